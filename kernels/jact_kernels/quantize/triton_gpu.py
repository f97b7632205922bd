# pyright: reportMissingImports=false
"""The quantiser in Triton: one pass over the input, and one over the codes, through jax-triton.

What a group's range comes to is written out here once more, as Triton cannot call JAX; the
conformance test holds both to the same bits.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.typing import DTypeLike

from jact_kernels import compat, noise
from jact_kernels.quantize import limits, reference
from jact_kernels.quantize.packed import as_bytes, as_codes
from jact_kernels.quantize.ranges import MIN_STEP, Scheme

TILE = 8192
"""About how many elements a program holds."""

MAX_GROUP = 1024

_FRACTION_BITS = tl.constexpr(reference.FRACTION_BITS)
_HALF = tl.constexpr(int(reference.TO_NEAREST))
_INDEX_FACTOR = tl.constexpr(noise.INDEX_FACTOR)
_SEED_FACTOR = tl.constexpr(noise.SEED_FACTOR)
_MIN_STEP = tl.constexpr(MIN_STEP)
_GREATEST = tl.constexpr(float(jnp.finfo(jnp.bfloat16).max))


def unsupported(scheme: Scheme, dtype: DTypeLike) -> str | None:
    """Why these kernels cannot take these arrays, or None if they can."""
    if why := limits.unsupported_on_gpus(scheme, dtype):
        return why
    groups = scheme.groups
    if groups.shape[-1] % (8 // scheme.bits):
        return f"the last axis, {groups.shape[-1]}, ends within a byte of codes"
    if groups.size > MAX_GROUP:
        return f"a group of {groups.size} elements is more than {MAX_GROUP}"
    return None


def quantize(x: jax.Array, seed: noise.Seed, *, scheme: Scheme) -> tuple[jax.Array, ...]:
    """Quantises `x`; see `jact_kernels.quantize`."""
    rows, columns = _flat_shape(scheme)
    constants = _constants(scheme)
    codes, *stored = compat.triton_call(
        x,
        lax.convert_element_type(jnp.asarray(seed), jnp.uint32).reshape(1),
        kernel=quantize_kernel,
        out_type=(
            jax.ShapeDtypeStruct((x.size * scheme.bits // 8,), jnp.uint8),
            jax.ShapeDtypeStruct(scheme.groups.grid_shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(scheme.groups.grid_shape, jnp.bfloat16),
        ),
        grid=rows * -(-columns // constants["WIDTH"]),
        STOCHASTIC=scheme.stochastic,
        **constants,
    )
    return as_codes(codes, scheme), *stored


def dequantize(codes: jax.Array, *stored: jax.Array, scheme: Scheme, dtype: DTypeLike) -> jax.Array:
    """Decodes codes; see `jact_kernels.dequantize`."""
    rows, columns = _flat_shape(scheme)
    constants = _constants(scheme)
    return compat.triton_call(
        as_bytes(codes, scheme),
        *stored,
        kernel=dequantize_kernel,
        out_type=jax.ShapeDtypeStruct(scheme.groups.shape, dtype),
        grid=rows * -(-columns // constants["WIDTH"]),
        LIMIT=min(float(jnp.finfo(kind).max) for kind in (jnp.float32, dtype)) / 2,
        **constants,
    )


def _flat_shape(scheme: Scheme) -> tuple[int, int]:
    groups = scheme.groups
    columns = math.prod(groups.shape[groups.last + 1 :])
    return groups.count // columns, columns


def _constants(scheme: Scheme) -> dict[str, int]:
    """What a program is specialised to: the array's sizes and the tile's, and the bits."""
    _, columns = _flat_shape(scheme)
    padded = triton.next_power_of_2(scheme.groups.size)
    width = min(triton.next_power_of_2(columns), max(TILE // padded, 8))
    return {
        "COLUMNS": columns,
        "GROUP": scheme.groups.size,
        "PADDED": padded,
        "WIDTH": max(width, 8 // scheme.bits),
        "BITS": scheme.bits,
    }


@triton.jit
def quantize_kernel(
    x,
    seed,
    codes,
    low_end,
    step_end,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Quantises the groups of `WIDTH` neighbouring columns."""
    LEVELS: tl.constexpr = 2**BITS - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    row = (tl.program_id(0) // tl.cdiv(COLUMNS, WIDTH)).to(tl.int64)
    first = (tl.program_id(0) % tl.cdiv(COLUMNS, WIDTH)) * WIDTH
    element = tl.arange(0, PADDED)[:, None]
    column = first + tl.arange(0, WIDTH)[None, :]
    inside = (element < GROUP) & (column < COLUMNS)
    index = (row * GROUP + element) * COLUMNS + column
    values = tl.load(x + index, mask=inside, other=0).to(tl.float32)
    # Beyond the group, its own first element again, which changes neither end.
    low = tl.reduce(tl.where(inside, values, float("inf")), 0, _smaller)
    high = tl.reduce(tl.where(inside, values, float("-inf")), 0, _greater)
    low, step = _affine(low, high, LEVELS)
    columns = first + tl.arange(0, WIDTH)
    place = row * COLUMNS + columns
    tl.store(low_end + place, low.to(tl.bfloat16), mask=columns < COLUMNS)
    tl.store(step_end + place, step.to(tl.bfloat16), mask=columns < COLUMNS)
    position = (values * 0.5 - low[None, :] * 0.5) * _inverse(step)[None, :]
    if STOCHASTIC:
        key = _group_key(tl.load(seed), low, step)
        spread = index.to(tl.uint32) * _INDEX_FACTOR
        random = _finalise(spread ^ key[None, :]) >> (32 - _FRACTION_BITS)
        offset = random.to(tl.int32)
    else:
        offset = _HALF
    code = (position.to(tl.int32) + offset) >> _FRACTION_BITS
    code = tl.minimum(tl.maximum(code, 0), LEVELS)
    shifts = (tl.arange(0, WIDTH) % PER_BYTE) * BITS
    parts = tl.reshape(code << shifts[None, :], [PADDED, WIDTH // PER_BYTE, PER_BYTE])
    byte = first // PER_BYTE + tl.arange(0, WIDTH // PER_BYTE)[None, :]
    where = (row * GROUP + element) * (COLUMNS // PER_BYTE) + byte
    whole = (element < GROUP) & (byte < COLUMNS // PER_BYTE)
    tl.store(codes + where, tl.sum(parts, 2).to(tl.uint8), mask=whole)


@triton.jit
def dequantize_kernel(
    codes,
    low_end,
    step_end,
    x,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Decodes the groups of `WIDTH` neighbouring columns."""
    LEVELS: tl.constexpr = 2**BITS - 1
    PER_BYTE: tl.constexpr = 8 // BITS
    row = (tl.program_id(0) // tl.cdiv(COLUMNS, WIDTH)).to(tl.int64)
    first = (tl.program_id(0) % tl.cdiv(COLUMNS, WIDTH)) * WIDTH
    element = tl.arange(0, PADDED)[:, None]
    byte = first // PER_BYTE + tl.arange(0, WIDTH // PER_BYTE)[None, :]
    where = (row * GROUP + element) * (COLUMNS // PER_BYTE) + byte
    whole = (element < GROUP) & (byte < COLUMNS // PER_BYTE)
    packed = tl.load(codes + where, mask=whole, other=0).to(tl.int32)
    shifts = tl.arange(0, PER_BYTE) * BITS
    parts = (packed[:, :, None] >> shifts[None, None, :]) & LEVELS
    code = tl.reshape(parts, [PADDED, WIDTH]).to(tl.float32)
    columns = first + tl.arange(0, WIDTH)
    place = row * COLUMNS + columns
    half_low = tl.load(low_end + place, mask=columns < COLUMNS, other=0).to(tl.float32) * 0.5
    half_step = tl.load(step_end + place, mask=columns < COLUMNS, other=0).to(tl.float32) * 0.5
    half = code * half_step[None, :] + half_low[None, :]
    half = _smaller(_greater(half, -LIMIT), LIMIT)
    inside = (element < GROUP) & (columns[None, :] < COLUMNS)
    index = (row * GROUP + element) * COLUMNS + columns[None, :]
    tl.store(x + index, (half * 2.0).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _affine(low, high, LEVELS: tl.constexpr):
    """The low end and the step of a group; see `ranges.affine`."""
    span = high * 0.5 - low * 0.5
    low = _round_down(low)
    step = _round_up((high * 0.5 - low * 0.5) * (2 / LEVELS))
    if LEVELS == 1:
        step = _smaller(step, _GREATEST)
    nothing = span - span
    return low + nothing, _greater(step, _MIN_STEP) + nothing


@triton.jit
def _round_down(x):
    bits = x.to(tl.int32, bitcast=True)
    away = (bits >> 31) & 0xFFFF
    return _greater(_upper_half((bits + away).to(tl.uint32, bitcast=True)), -_GREATEST)


@triton.jit
def _round_up(x):
    return _upper_half(x.to(tl.uint32, bitcast=True) + 0xFFFF)


@triton.jit
def _upper_half(bits):
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(step):
    """`2**(FRACTION_BITS + 1) / step`, a little too small; see `reference`."""
    bits = step.to(tl.int32, bitcast=True)
    quotient = (1 << 29) // (((bits >> 16) & 0x7F) | 0x80)
    return quotient.to(tl.float32) * (~bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _group_key(seed, low, step):
    """The key of a group's noise; see `noise.group_key` and `ranges.key_bits`."""
    bits = (low.to(tl.uint32, bitcast=True) >> 16) | step.to(tl.uint32, bitcast=True)
    return _finalise(bits ^ (seed * _SEED_FACTOR))


@triton.jit
def _finalise(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return (x ^ (x >> 15)) * 0x846CA68B
