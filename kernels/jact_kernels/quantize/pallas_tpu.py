"""The quantiser as one Mosaic TPU kernel: the input is read once, the codes are written once.

A block holds whole groups, so its body is the reference's arithmetic on a block in VMEM. The matrix
unit packs one and two bits: a product with powers of two moves them between lanes, and is exact.
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
    if why := limits.unsupported_scheme(scheme):
        return why
    if groups.last != len(groups.shape) - 2:
        return "groups that do not end at the axis before the last are left to XLA"
    if groups.shape[-1] < LANES:
        return f"fewer than {LANES} columns lie in memory otherwise, and would be copied"
    if why := limits.unsupported_packing(scheme):
        return why
    tile = 256 // (scheme.bits * _codes_per_entry(scheme))
    whole = groups.axis == groups.last and groups.block == groups.shape[groups.axis]
    if not whole and (groups.size % tile or groups.shape[groups.last] % tile):
        return f"codes lie in tiles of {tile} rows, and the groups' {groups.size} would cut them"
    if groups.size * _block_columns(scheme) > MAX_BLOCK_ELEMENTS:
        return f"groups of {groups.size} elements are too large for a block"
    return None


def quantize(
    x: jax.Array, seed: noise.Seed, *, scheme: Scheme, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Quantises `x`; see `jact_kernels.quantize`."""
    pl, pltpu = compat.mosaic_tpu()
    groups = scheme.groups
    rows, size, columns = _flat_shape(scheme)

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
        codes = _packed(codes, scheme.bits) if scheme.bits < 4 else codes
        codes_ref[...] = codes.astype(codes_ref.dtype)

    end = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    stored_types = jax.eval_shape(lambda low, high: measure(low, high, scheme)[0], end, end)
    code_dtype = reference.CODE_DTYPES.get(scheme.bits, jnp.uint8)
    stored_columns = columns // _codes_per_entry(scheme)
    grid, values, entries, ends = _blocks(pl, scheme)
    codes, *stored = pl.pallas_call(
        body,
        out_shape=(jax.ShapeDtypeStruct((rows, size, stored_columns), code_dtype), *stored_types),
        grid=grid,
        in_specs=(pl.BlockSpec(memory_space=pltpu.SMEM), values),
        out_specs=(entries, *(ends for _ in stored_types)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="quantize",
    )(
        lax.convert_element_type(jnp.asarray(seed), jnp.uint32).reshape(1),
        x.reshape(rows, size, columns),
    )
    codes = codes.reshape(*groups.shape[:-1], stored_columns)
    return codes, *(entry.reshape(groups.grid_shape) for entry in stored)


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

    def body(codes_ref: Any, *refs: Any) -> None:
        *stored_refs, out_ref = refs
        low, step, _ = restore(tuple(ref[...] for ref in stored_refs), scheme)
        half_low, half_step = (
            jnp.broadcast_to(lax.expand_dims(end * jnp.float32(0.5), (1,)), out_ref.shape)
            for end in (low, step)
        )
        codes = codes_ref[...].astype(jnp.int32)
        codes = _unpacked(codes, scheme.bits) if scheme.bits < 4 else codes
        out_ref[...] = reference.value(codes.astype(jnp.float32), half_low, half_step, dtype)

    grid, values, entries, ends = _blocks(pl, scheme)
    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, size, columns), dtype),
        grid=grid,
        in_specs=(entries, *(ends for _ in stored)),
        out_specs=values,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="dequantize",
    )(codes.reshape(rows, size, -1), *(entry.reshape(rows, columns) for entry in stored))
    return out.reshape(scheme.groups.shape)


def _flat_shape(scheme: Scheme) -> tuple[int, int, int]:
    """The array as (groups one after the other, elements of a group, columns)."""
    groups = scheme.groups
    columns = math.prod(groups.shape[groups.last + 1 :])
    return groups.count // columns, groups.size, columns


def _codes_per_entry(scheme: Scheme) -> int:
    """How many codes share an entry of the array that stores them."""
    return 8 // scheme.bits if scheme.bits < 4 else 1


def _block_columns(scheme: Scheme) -> int:
    """The most columns, in whole lanes that divide them, of which a block is not too large."""
    _, size, columns = _flat_shape(scheme)
    lanes = LANES * _codes_per_entry(scheme)
    widths = [width for width in range(lanes, columns, lanes) if columns % width == 0]
    fitting = [width for width in (*widths, columns) if ROWS * size * width <= MAX_BLOCK_ELEMENTS]
    return max(fitting, default=min((*widths, columns)))


def _blocks(pl: Any, scheme: Scheme) -> tuple[tuple[int, int], Any, Any, Any]:
    """The grid, and the blocks of what has one entry per element, of codes, and of ranges."""
    rows, size, columns = _flat_shape(scheme)
    width = _block_columns(scheme)

    def specs(width: int) -> Any:
        return pl.BlockSpec((ROWS, size, width), lambda row, column: (row, 0, column))

    ends = pl.BlockSpec((ROWS, width), lambda row, column: (row, column))
    grid = -(-rows // ROWS), columns // width
    return grid, specs(width), specs(width // _codes_per_entry(scheme)), ends


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """Neighbouring columns of codes of one or two bits, int32, as one byte."""
    columns, per_byte = codes.shape[-1], 8 // bits
    column, byte = (
        lax.broadcasted_iota(jnp.int32, (columns, columns // per_byte), axis) for axis in range(2)
    )
    worth = jnp.int32(1) << _place(column, bits)
    return _moved(codes, jnp.where(_byte(column, bits) == byte, worth, jnp.int32(0)))


def _unpacked(packed: jax.Array, bits: int) -> jax.Array:
    """Undoes `_packed`."""
    columns = packed.shape[-1] * 8 // bits
    byte, column = (
        lax.broadcasted_iota(jnp.int32, (packed.shape[-1], columns), axis) for axis in range(2)
    )
    together = _moved(packed, (_byte(column, bits) == byte).astype(jnp.int32))
    place = _place(lax.broadcasted_iota(jnp.int32, together.shape, together.ndim - 1), bits)
    return (together >> place) & jnp.int32(2**bits - 1)


def _byte(column: jax.Array, bits: int) -> jax.Array:
    """Which byte holds a column's code."""
    return column >> jnp.int32({1: 3, 2: 2}[bits])


def _place(column: jax.Array, bits: int) -> jax.Array:
    """Where in its byte a column's code begins."""
    return (column & jnp.int32(8 // bits - 1)) * jnp.int32(bits)


def _moved(entries: jax.Array, weights: jax.Array) -> jax.Array:
    """A product along the last axis of integers that bfloat16 holds, with sums below 256."""
    rows = entries.reshape(-1, entries.shape[-1])
    rows, weights = (x.astype(jnp.float32).astype(jnp.bfloat16) for x in (rows, weights))
    product = jnp.dot(rows, weights, preferred_element_type=jnp.float32)
    return product.astype(jnp.int32).reshape(*entries.shape[:-1], weights.shape[-1])


def _index(pl: Any, block: tuple[int, ...], shape: tuple[int, int, int]) -> jax.Array:
    """The spread index of each element of this block."""
    row, element, column = (lax.broadcasted_iota(jnp.int32, block, axis) for axis in range(3))
    row = row + pl.program_id(0) * jnp.int32(block[0])
    column = column + pl.program_id(1) * jnp.int32(block[2])
    _, size, columns = shape
    return noise.spread_index((row * jnp.int32(size) + element) * jnp.int32(columns) + column)
