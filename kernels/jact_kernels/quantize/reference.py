"""The quantiser in plain JAX: one reduction and elementwise operations, which XLA fuses.

Results do not depend on whether a compiler contracts a product and a sum. In `_position` and
`dequantize` the products before a sum are exact: by a power of two, or of an 8-bit code and the 8
significant bits of a bfloat16; and noise is added as an integer.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jact_kernels import noise
from jact_kernels.grouping import Groups
from jact_kernels.mask.reference import pack_mask, unpack_mask

FLOATS = ("float16", "bfloat16", "float32", "float64")
CODE_DTYPES = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8}

FRACTION_BITS = 22
"""Bits after the point of a code before rounding; with 8 before it, all fit a signed word."""

MIN_STEP = 2.0**-100
"""The least step other than zero; its inverse in fixed point still is a float32."""

_UPPER_HALF = 0xFFFF0000
_LOWER_HALF = 0x0000FFFF


# Under `jit`, arrays of equal shapes share one trace and one lowering, and calls outside of any
# `jit` do not run operation by operation.
@functools.partial(jax.jit, static_argnames=("groups", "bits", "stochastic"))
def quantize(
    x: jax.Array, *, groups: Groups, bits: int, seed: noise.Seed, stochastic: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises `x`; see `jact_kernels.quantize`."""
    x = x.astype(jnp.float32).reshape(groups.split_shape)
    low, step = _group_range(x, groups, 2**bits - 1)
    scale = _scale(low, step)
    key = noise.group_key(seed, _range_bits(low, step))
    # Without the barrier, a compiler fuses what is computed once per group into the loop over its
    # elements, and computes it for each of them.
    low, step, scale, key = lax.optimization_barrier((low, step, scale, key))
    position = _position(x, *scale).astype(jnp.int32)
    if stochastic:
        random = noise.random_bits_of(key, x.shape)
        offset = lax.bitcast_convert_type(random >> jnp.uint32(32 - FRACTION_BITS), jnp.int32)
    else:
        offset = jnp.full(x.shape, 1 << (FRACTION_BITS - 1), jnp.int32)
    codes = (position + offset) >> jnp.int32(FRACTION_BITS)
    codes = lax.clamp(jnp.int32(0), codes, jnp.int32(2**bits - 1)).reshape(groups.shape)
    codes = pack_mask(codes.astype(bool)) if bits == 1 else _narrow(codes, bits)
    low, step = (lax.squeeze(end, groups.axes).astype(jnp.bfloat16) for end in (low, step))
    return codes, low, step


@functools.partial(jax.jit, static_argnames=("groups", "bits", "dtype"))
def dequantize(
    codes: jax.Array,
    low: jax.Array,
    step: jax.Array,
    *,
    groups: Groups,
    bits: int,
    dtype: DTypeLike,
) -> jax.Array:
    """Decodes codes; see `jact_kernels.dequantize`."""
    if bits == 1:
        codes = unpack_mask(codes, groups.shape)
    codes = codes.astype(jnp.float32).reshape(groups.split_shape)
    # Half the value is computed, as the product alone may exceed float32 where the sum does not.
    half_low, half_step = (_half(_spread(end, groups)) for end in (low, step))
    limit = jnp.float32(min(float(jnp.finfo(kind).max) for kind in (jnp.float32, dtype)) / 2)
    half = lax.clamp(-limit, codes * half_step + half_low, limit)
    return (half * jnp.float32(2)).astype(dtype).reshape(groups.shape)


def rounding_variance(x: jax.Array, *, groups: Groups, bits: int, stochastic: bool) -> jax.Array:
    """The expected squared error per element; see `jact_kernels.rounding_variance`."""
    x = x.astype(jnp.float32).reshape(groups.split_shape)
    low, step = _group_range(x, groups, 2**bits - 1)
    position = _position(x, *_scale(low, step)) * jnp.float32(2.0**-FRACTION_BITS)
    fraction = position - jnp.floor(position)
    step = jnp.broadcast_to(step, x.shape)
    if stochastic:
        variance = step * step * fraction * (jnp.float32(1) - fraction)
    else:
        variance = jnp.square(step * jnp.minimum(fraction, jnp.float32(1) - fraction))
    return variance.reshape(groups.shape)


def _group_range(x: jax.Array, groups: Groups, levels: int) -> tuple[jax.Array, jax.Array]:
    """The low end and the step of each group: float32 values that bfloat16 holds exactly.

    Such that `low <= x <= low + levels * step`; both are NaN where the group is not finite.
    """
    low = jnp.min(x, axis=groups.axes, keepdims=True)
    high = jnp.max(x, axis=groups.axes, keepdims=True)
    # Zero for finite groups; NaN for the others, and it makes their whole range NaN.
    nothing = (low - low) + (high - high)
    low = _round_down(low)
    # Half the span, as the whole may exceed float32.
    half_span = _half(high) - _half(low)
    step = _round_up(half_span * jnp.float32(2 / levels))
    # The product above is rounded and may have ended up just below the bfloat16 number it exceeds.
    too_small = _half(step) * jnp.float32(levels) < half_span
    step = jnp.where(too_small, _round_up(step * jnp.float32(1 + 2**-8)), step)
    step = jnp.where(half_span > 0, jnp.maximum(step, jnp.float32(MIN_STEP)), jnp.float32(0))
    return low + nothing, step + nothing


def _scale(low: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Half the low end of each group, and what turns half a distance from it into a position."""
    positive = step > 0
    inverse = jnp.float32(2.0 ** (FRACTION_BITS + 1)) / jnp.where(positive, step, jnp.float32(1))
    # A step of zero has one code only; a step of NaN must not meet a conversion to integers.
    inverse = jnp.where(positive, inverse, jnp.float32(0))
    return jnp.where(jnp.isnan(low), jnp.float32(0), _half(low)), inverse


def _position(x: jax.Array, half_low: jax.Array, inverse: jax.Array) -> jax.Array:
    """Where each element lies between the codes, times `2**FRACTION_BITS`."""
    return (_half(x) - jnp.broadcast_to(half_low, x.shape)) * jnp.broadcast_to(inverse, x.shape)


def _narrow(codes: jax.Array, bits: int) -> jax.Array:
    """Converts int32 codes to the dtype that stores them."""
    if bits == 8:
        return codes.astype(jnp.uint8)

    def through_bytes(codes: jax.Array) -> jax.Array:
        return lax.optimization_barrier(codes.astype(jnp.uint8)).astype(CODE_DTYPES[bits])

    def directly(codes: jax.Array) -> jax.Array:
        return codes.astype(CODE_DTYPES[bits])

    # A loop that writes less than a byte at a time is not vectorised on a CPU. Keeping the
    # arithmetic out of it makes the whole five times faster there; elsewhere it would cost a copy.
    return lax.platform_dependent(codes, cpu=through_bytes, default=directly)


def _half(x: jax.Array) -> jax.Array:
    return x * jnp.float32(0.5)


def _spread(end: jax.Array, groups: Groups) -> jax.Array:
    """One entry per group as float32, repeated for every element of the group."""
    end = lax.expand_dims(end.astype(jnp.float32), groups.axes)
    return jnp.broadcast_to(end, groups.split_shape)


def _range_bits(low: jax.Array, step: jax.Array) -> jax.Array:
    """The 32 bits of a group's bfloat16 range, for the noise."""
    low_bits, step_bits = (lax.bitcast_convert_type(end, jnp.uint32) for end in (low, step))
    return (low_bits >> jnp.uint32(16)) | (step_bits & jnp.uint32(_UPPER_HALF))


def _round_down(x: jax.Array) -> jax.Array:
    """The greatest finite bfloat16 number that is not above `x`, or the least one there is.

    Devices differ in whether they keep subnormal numbers and negative zero, so both become zero.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    away = jnp.where(x < 0, jnp.uint32(_LOWER_HALF), jnp.uint32(0))
    rounded = _upper_half(bits + away)
    least = jnp.float32(-float(jnp.finfo(jnp.bfloat16).max))
    tiny = jnp.abs(x) < jnp.float32(2.0**-126)
    return jnp.where(tiny, jnp.float32(0), jnp.maximum(rounded, least))


def _round_up(x: jax.Array) -> jax.Array:
    """The least bfloat16 number that is not below a positive `x`, or the greatest there is."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    greatest = jnp.float32(float(jnp.finfo(jnp.bfloat16).max))
    return jnp.minimum(_upper_half(bits + jnp.uint32(_LOWER_HALF)), greatest)


def _upper_half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits & jnp.uint32(_UPPER_HALF), jnp.float32)
