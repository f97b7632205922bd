"""The quantiser as one Mosaic TPU kernel: the input is read once, the codes are written once.

A block holds whole groups, so its body is the reference's arithmetic on a block in VMEM.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jact_kernels import compat, noise
from jact_kernels.quantize import limits, reference
from jact_kernels.quantize.ranges import Scheme, key_bits, measure, restore

LANES = 128
ROWS = 8
"""Groups per block: as many as there are sublanes, since ranges have one row per group."""

MAX_BLOCK_ELEMENTS = 2**19
"""A float32 block of 2 MiB; the values in between take several times that of VMEM's 16."""


def unsupported(scheme: Scheme, dtype: DTypeLike) -> str | None:
    """Why this kernel cannot take these arrays, or None if it can."""
    groups = scheme.groups
    if jnp.dtype(dtype).name not in ("bfloat16", "float32"):
        return f"{jnp.dtype(dtype).name} is left to XLA"
    if scheme.bits == 1:
        return "one bit per element is left to XLA: neighbouring lanes cannot be packed"
    if why := limits.unsupported_scheme(scheme):
        return why
    if groups.last != len(groups.shape) - 2:
        return "groups that do not end at the axis before the last are left to XLA"
    if groups.shape[-1] < LANES:
        return f"fewer than {LANES} columns lie in memory otherwise, and would be copied"
    tile = 256 // scheme.bits
    whole = groups.axis == groups.last and groups.block == groups.shape[groups.axis]
    if not whole and (groups.size % tile or groups.shape[groups.last] % tile):
        return f"codes lie in tiles of {tile} rows, and the groups' {groups.size} would cut them"
    if groups.size * _block_columns(groups.shape[-1], groups.size) > MAX_BLOCK_ELEMENTS:
        return f"groups of {groups.size} elements are too large for a block"
    return None


def quantize(
    x: jax.Array, seed: noise.Seed, *, scheme: Scheme, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Quantises `x`; see `jact_kernels.quantize`."""
    pl, pltpu = compat.mosaic_tpu()
    groups = scheme.groups
    rows, size, columns = _flat_shape(scheme)
    width = _block_columns(columns, size)

    def body(seed_ref: Any, x_ref: Any, codes_ref: Any, *stored_refs: Any) -> None:
        x = x_ref[...].astype(jnp.float32)
        numbers = reference.nan_to_infinity(x)
        stored, group = measure(jnp.min(numbers, axis=1), jnp.max(numbers, axis=1), scheme)
        for ref, entry in zip(stored_refs, stored, strict=True):
            ref[...] = entry
        key = noise.group_key(seed_ref[0], key_bits(group, scheme))
        half_low, inverse, key = (
            lax.expand_dims(entry, (1,)) for entry in (*reference.scale(group), key)
        )
        place = reference.position(x, half_low, inverse).astype(jnp.int32)
        shift = reference.TO_NEAREST
        if scheme.stochastic:
            index = _index(pl, x.shape, (rows, size, columns))
            shift = reference.random_shift(noise.finalise(index ^ jnp.broadcast_to(key, x.shape)))
        codes = (place + shift) >> jnp.int32(reference.FRACTION_BITS)
        codes = reference.clamp(codes, x, scheme.levels, None)
        codes_ref[...] = codes.astype(codes_ref.dtype)

    end = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    stored_types = jax.eval_shape(lambda low, high: measure(low, high, scheme)[0], end, end)
    code_dtype = reference.CODE_DTYPES[scheme.bits]
    values, ends = _block_specs(pl, size, width)
    codes, *stored = pl.pallas_call(
        body,
        out_shape=(jax.ShapeDtypeStruct((rows, size, columns), code_dtype), *stored_types),
        grid=(-(-rows // ROWS), columns // width),
        in_specs=(pl.BlockSpec(memory_space=pltpu.SMEM), values),
        out_specs=(values, *(ends for _ in stored_types)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="quantize",
    )(
        lax.convert_element_type(jnp.asarray(seed), jnp.uint32).reshape(1),
        x.reshape(rows, size, columns),
    )
    return codes.reshape(groups.shape), *(entry.reshape(groups.grid_shape) for entry in stored)


def dequantize(
    codes: jax.Array,
    *stored: jax.Array,
    scheme: Scheme,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Decodes codes; see `jact_kernels.dequantize`."""
    pl, pltpu = compat.mosaic_tpu()
    rows, size, columns = _flat_shape(scheme)
    width = _block_columns(columns, size)

    def body(codes_ref: Any, *refs: Any) -> None:
        *stored_refs, out_ref = refs
        low, step, _ = restore(tuple(ref[...] for ref in stored_refs), scheme)
        half_low, half_step = (
            jnp.broadcast_to(lax.expand_dims(end * jnp.float32(0.5), (1,)), out_ref.shape)
            for end in (low, step)
        )
        codes = codes_ref[...].astype(jnp.int32).astype(jnp.float32)
        out_ref[...] = reference.value(codes, half_low, half_step, dtype)

    values, ends = _block_specs(pl, size, width)
    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, size, columns), dtype),
        grid=(-(-rows // ROWS), columns // width),
        in_specs=(values, *(ends for _ in stored)),
        out_specs=values,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="dequantize",
    )(codes.reshape(rows, size, columns), *(entry.reshape(rows, columns) for entry in stored))
    return out.reshape(scheme.groups.shape)


def _flat_shape(scheme: Scheme) -> tuple[int, int, int]:
    """The array as (groups one after the other, elements of a group, columns)."""
    groups = scheme.groups
    columns = math.prod(groups.shape[groups.last + 1 :])
    return groups.count // columns, groups.size, columns


def _block_columns(columns: int, size: int) -> int:
    """The most columns, in whole lanes that divide them, of which a block is not too large."""
    widths = [width for width in range(LANES, columns, LANES) if columns % width == 0]
    fitting = [width for width in (*widths, columns) if ROWS * size * width <= MAX_BLOCK_ELEMENTS]
    return max(fitting, default=min((*widths, columns)))


def _block_specs(pl: Any, size: int, width: int) -> tuple[Any, Any]:
    """The blocks of what has one entry per element, and of what has one per group."""
    values = pl.BlockSpec((ROWS, size, width), lambda row, column: (row, 0, column))
    return values, pl.BlockSpec((ROWS, width), lambda row, column: (row, column))


def _index(pl: Any, block: tuple[int, ...], shape: tuple[int, int, int]) -> jax.Array:
    """The spread index of each element of this block."""
    row, element, column = (lax.broadcasted_iota(jnp.int32, block, axis) for axis in range(3))
    row = row + pl.program_id(0) * jnp.int32(block[0])
    column = column + pl.program_id(1) * jnp.int32(block[2])
    _, size, columns = shape
    return noise.spread_index((row * jnp.int32(size) + element) * jnp.int32(columns) + column)
