"""The quantiser in plain JAX: one reduction and elementwise operations, which XLA fuses.

What is computed once per group is in `ranges`; what is computed for each element is here. Results
do not depend on whether a compiler contracts a product and a sum. In `position` and `dequantize`
the products before a sum are exact: by a power of two, or of an 8-bit code and the 8 significant
bits of a bfloat16; and noise is added as an integer.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jact_kernels import noise, packing
from jact_kernels.grouping import Groups
from jact_kernels.quantize import ranges
from jact_kernels.quantize.ranges import LEAST_NORMAL, Range, Scheme

FLOATS = ("float16", "bfloat16", "float32", "float64")
CODE_DTYPES = {4: jnp.uint4, 8: jnp.uint8}
"""Of codes that are stored in the array's shape; those of fewer bits are packed into bytes."""

FRACTION_BITS = 22
"""Bits after the point of a code before rounding; with 8 before it, all fit a signed word."""

TO_NEAREST = np.int32(1 << (FRACTION_BITS - 1))
"""What is added to a position before it is rounded down, to round it to the nearest."""


# Under `jit`, arrays of equal shapes share one trace and one lowering, and calls outside of any
# `jit` do not run operation by operation.
@functools.partial(jax.jit, static_argnames="scheme")
def quantize(x: jax.Array, *, scheme: Scheme, seed: noise.Seed) -> tuple[jax.Array, ...]:
    """Quantises `x`; see `jact_kernels.quantize`."""
    groups = scheme.groups
    x = x.reshape(groups.split_shape)
    stored, group = ranges.measure(*ends(x, groups), scheme)
    x = x.astype(jnp.float32)
    key = noise.group_key(seed, ranges.key_bits(group, scheme))
    # Without the barrier, a compiler fuses what is computed once per group into the loop over its
    # elements, and computes it for each of them.
    stored, *each = lax.optimization_barrier((stored, *scale(group), key, group.twice_zero))
    half_low, inverse, key, twice_zero = (
        None if entry is None else lax.expand_dims(entry, groups.axes) for entry in each
    )
    assert half_low is not None and inverse is not None and key is not None
    place = position(x, half_low, inverse).astype(jnp.int32)
    shift = random_shift(noise.random_bits_of(key, x.shape)) if scheme.stochastic else TO_NEAREST
    codes = clamp((place + shift) >> jnp.int32(FRACTION_BITS), x, scheme.levels, twice_zero)
    codes = _split(codes.reshape(groups.shape), scheme.planes)
    return *codes, *(_row_major(entry) for entry in stored)


@functools.partial(jax.jit, static_argnames=("scheme", "dtype"))
def dequantize(*code: jax.Array, scheme: Scheme, dtype: DTypeLike) -> jax.Array:
    """Decodes a code; see `jact_kernels.dequantize`."""
    groups, count = scheme.groups, len(scheme.planes)
    codes = _join(code[:count], scheme.planes, groups.shape).reshape(groups.split_shape)
    group = ranges.restore(code[count:], scheme)
    if scheme.second is not None:
        # Else it is restored for each element anew.
        group = lax.optimization_barrier(group)
    half_low, half_step = (_spread(_half(end), groups) for end in group[:2])
    return value(codes, half_low, half_step, dtype).reshape(groups.shape)


def rounding_variance(
    x: jax.Array, *, scheme: Scheme, known_ends: tuple[jax.Array, jax.Array] | None = None
) -> jax.Array:
    """The expected squared error per element; see `jact_kernels.rounding_variance`."""
    groups = scheme.groups
    x = x.astype(jnp.float32).reshape(groups.split_shape)
    _, group = ranges.measure(*(known_ends or ends(x, groups)), scheme)
    low, step, twice_zero = (
        None if entry is None else lax.expand_dims(entry, groups.axes) for entry in group
    )
    assert low is not None and step is not None
    half_low, inverse = scale(Range(low, step))
    # Nothing is lost where there is one code only.
    inverse = jnp.where(step == 0, jnp.float32(0), inverse)
    place = position(x, half_low, inverse) * jnp.float32(2.0**-FRACTION_BITS)
    below = jnp.floor(place)
    fraction = place - below
    share = fraction if scheme.stochastic else jnp.round(fraction)

    def squared_error(code: jax.Array) -> jax.Array:
        code = clamp(code.astype(jnp.int32), x, scheme.levels, twice_zero)
        return jnp.square(step * (code.astype(jnp.float32) - place))

    down, up = squared_error(below), squared_error(below + jnp.float32(1))
    return ((jnp.float32(1) - share) * down + share * up).reshape(groups.shape)


def scale(group: Range) -> tuple[jax.Array, jax.Array]:
    """Half the low end of each group, and what turns half a distance from it into a position."""
    return _half(group.low), inverse_step(group.step)


def inverse_step(step: jax.Array) -> jax.Array:
    """`2**(FRACTION_BITS + 1) / step`, too small by less than 2**-21 of it.

    In integers, as not every device, nor every compiler, rounds a quotient of floats correctly.

    Args:
      step: normal numbers of 8 significant bits; others give a number without meaning.
    """
    bits = lax.bitcast_convert_type(step, jnp.int32)
    significand = (bits >> jnp.int32(16)) & jnp.int32(0x7F) | jnp.int32(0x80)
    # At least 22 bits, and no more than a float32 holds.
    quotient = lax.div(jnp.int32(1 << 29), significand).astype(jnp.float32)
    # Exponents are counted from 127, so 255 minus that of the step is the one of a power of two.
    power = lax.bitcast_convert_type(~bits & jnp.int32(0x7F800000), jnp.float32)
    return quotient * power


def position(x: jax.Array, half_low: jax.Array, inverse: jax.Array) -> jax.Array:
    """Where each element lies between the codes, times `2**FRACTION_BITS`."""
    return (_half(x) - jnp.broadcast_to(half_low, x.shape)) * jnp.broadcast_to(inverse, x.shape)


def random_shift(random: jax.Array) -> jax.Array:
    """What is added to a position before it is rounded down, from random bits."""
    return lax.bitcast_convert_type(random >> jnp.uint32(32 - FRACTION_BITS), jnp.int32)


def value(
    codes: jax.Array, half_low: jax.Array, half_step: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """What codes, float32, stand for, cut to the finite range of `dtype`."""
    # Half the value is computed, as the product alone may exceed float32 where the sum does not.
    limit = min(float(jnp.finfo(kind).max) for kind in (jnp.float32, dtype)) / 2
    half = lax.clamp(jnp.float32(-limit), codes * half_step + half_low, jnp.float32(limit))
    return (half * jnp.float32(2)).astype(dtype)


def clamp(codes: jax.Array, x: jax.Array, levels: int, twice_zero: jax.Array | None) -> jax.Array:
    """Keeps codes within the range and, where zero has a place among them, on their side of it."""
    if twice_zero is None:
        return lax.clamp(jnp.int32(0), codes, jnp.int32(levels))
    twice_zero = jnp.broadcast_to(twice_zero, codes.shape)
    positive = x >= jnp.float32(LEAST_NORMAL)
    negative = x <= jnp.float32(-LEAST_NORMAL)
    at_zero = twice_zero >> jnp.int32(1)
    least = jnp.where(positive, at_zero + jnp.int32(1), jnp.int32(0))
    below = (twice_zero - jnp.int32(1)) >> jnp.int32(1)
    greatest = jnp.where(positive, jnp.int32(levels), jnp.where(negative, below, at_zero))
    return lax.clamp(least, codes, greatest)


def ends(x: jax.Array, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest element of each group, float32; infinite or NaN where one is.

    Args:
      x: the array, in `groups.split_shape`.
      groups: which elements share a range.
    """
    axes = groups.axes

    def together(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        infinity = jnp.asarray(jnp.inf, x.dtype)

        def extend(
            ends: tuple[jax.Array, jax.Array], others: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return jnp.minimum(ends[0], others[0]), jnp.maximum(ends[1], others[1])

        return tuple(lax.reduce((x, x), (infinity, -infinity), extend, axes))

    def apart(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nan_to_infinity(x)
        return jnp.min(x, axis=axes), jnp.max(x, axis=axes)

    # On a GPU one reduction reads the elements once, and leaves their layout alone: for two, XLA
    # may turn the codes around and back again. Elsewhere two are faster. XLA's minimum and maximum
    # drop NaN where it vectorises them on a CPU; on a GPU they do not, and replacing it would cost
    # further passes.
    low, high = lax.platform_dependent(x, cuda=together, default=apart)
    # The ends are converted rather than the elements, which is the same: else XLA writes the codes
    # of 16-bit arrays transposed on a GPU, and turns them in a kernel of its own. The barrier keeps
    # a compiler from reducing the groups anew for each reader of their ends.
    return lax.optimization_barrier((low.astype(jnp.float32), high.astype(jnp.float32)))


def nan_to_infinity(x: jax.Array) -> jax.Array:
    """Replaces NaN by infinity, which likewise makes the range of its group NaN."""
    return jnp.where(x == x, x, jnp.asarray(jnp.inf, x.dtype))


def _row_major(x: jax.Array) -> jax.Array:
    """The array, row-major in memory on a GPU.

    Readers of the decoded array may want it transposed, and XLA would hand that on to the codes, by
    way of the ranges, and from there to the array. Codes follow their ranges. They are not tied to
    an order themselves, as XLA fails to transpose some arrays of two bits where a loop stacks them.
    """

    def tied_down(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    return lax.platform_dependent(x, cuda=tied_down, default=lambda x: x)


def _split(codes: jax.Array, planes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The arrays that store int32 codes, in so many bits each, the highest bits first."""
    arrays, below = [], sum(planes)
    for width in planes:
        below -= width
        part = codes if below == 0 and len(planes) == 1 else codes >> jnp.int32(below)
        if len(planes) > 1:
            part = part & jnp.int32(2**width - 1)
        arrays.append(
            _narrow(part, width) if width in CODE_DTYPES else packing.pack(part, bits=width)
        )
    return tuple(arrays)


def _join(
    arrays: Sequence[jax.Array], planes: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array:
    """What `_split` took apart, float32 of this shape."""
    codes, below = jnp.float32(0), sum(planes)
    for part, width in zip(arrays, planes, strict=True):
        below -= width
        part = _widen(
            part if width in CODE_DTYPES else packing.unpack(part, shape=shape, bits=width)
        )
        codes = part if width == sum(planes) else codes + part * jnp.float32(2**below)
    return codes


def _narrow(codes: jax.Array, bits: int) -> jax.Array:
    """Converts int32 codes to the dtype that stores them."""
    if bits == 8:
        return codes.astype(jnp.uint8)

    def through_bytes(codes: jax.Array) -> jax.Array:
        whole = lax.optimization_barrier(codes.astype(jnp.uint8))
        return _by_bytes(whole, CODE_DTYPES[bits], bits)

    def directly(codes: jax.Array) -> jax.Array:
        return codes.astype(CODE_DTYPES[bits])

    # A loop that writes less than a byte at a time is not vectorised on a CPU. Keeping the
    # arithmetic out of it makes the whole many times faster there; elsewhere it would cost a copy.
    return lax.platform_dependent(codes, cpu=through_bytes, default=directly)


def _widen(codes: jax.Array) -> jax.Array:
    """Converts codes to float32."""
    if codes.dtype == jnp.uint8:
        return codes.astype(jnp.float32)
    bits = jnp.iinfo(codes.dtype).bits

    def by_bytes(codes: jax.Array) -> jax.Array:
        return _by_bytes(codes, jnp.uint8, bits).astype(jnp.float32)

    def directly(codes: jax.Array) -> jax.Array:
        return codes.astype(jnp.float32)

    return lax.platform_dependent(codes, cpu=by_bytes, default=directly)


def _by_bytes(codes: jax.Array, dtype: DTypeLike, bits: int) -> jax.Array:
    """Converts codes between `bits` each and a byte each, in a loop over the bytes they lie in.

    A CPU's compiler then makes a whole byte at once: four to eight times faster than by codes.
    """
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        return lax.optimization_barrier(codes.astype(dtype))
    split = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    return lax.optimization_barrier(split.astype(dtype)).reshape(codes.shape)


def _half(x: jax.Array) -> jax.Array:
    return x * jnp.float32(0.5)


def _spread(end: jax.Array, groups: Groups) -> jax.Array:
    """One entry per group, repeated for every element of the group."""
    return jnp.broadcast_to(lax.expand_dims(end, groups.axes), groups.split_shape)
