"""The range of a group: what is computed once per group, and how it is stored.

A code `c` stands for `low + c * step`. Steps are float32 numbers that bfloat16 holds exactly, so
that the product is exact. Codes are made with the range as it is stored, which `restore` returns:
codes made with any other would be biased.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jact_kernels.grouping import Groups, plan_groups

STORAGES = ("bfloat16", "float32", "uint8")
"""How ranges may be stored; see `Scheme`."""

MIN_STEP = 2.0**-100
"""The least step other than zero; its inverse in fixed point still is a float32."""

LEAST_NORMAL = 2.0**-125
"""Smaller magnitudes count as zero, as devices differ in whether they keep those whose half, which
is what is computed with, is a subnormal number."""

GREATEST = float(jnp.finfo(jnp.bfloat16).max)
"""The greatest finite bfloat16 number."""

SECOND_GROUP = 32
"""About how many 8-bit ranges share what they are relative to."""

_UPPER_HALF = 0xFFFF0000
_LOWER_HALF = 0x0000FFFF
# An 8-bit step has four bits of exponent and four of mantissa: the upper bits of a float32, counted
# from the greatest step around. The first and the last code are for a step of zero and of NaN.
_DROPPED_BITS = 19
_GREATEST_STEP, _NAN_STEP = 254, 255

Stored = tuple[jax.Array, ...]


class Range(NamedTuple):
    """The range of each group.

    Attributes:
      low: what code 0 stands for, float32; NaN for a group that is not finite.
      step: the distance between codes, float32; zero for a constant group.
      twice_zero: twice the place of zero among the codes, int32: odd where zero is the edge between
        two codes. None where zero has no place of its own.
    """

    low: jax.Array
    step: jax.Array
    twice_zero: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """What ranges look like, as static Python values.

    Attributes:
      groups: which elements share a range.
      bits: bits per code.
      stochastic: whether codes are rounded at random; then the outermost codes reach the ends of
        the range, else they stay half a step inside where zero is an edge.
      zero_edge: whether zero is an edge between two codes, or a code itself in groups of one sign.
      storage: "bfloat16" for both ends in 16 bits, "float32" for a low end in 32, or "uint8" for
        both in 8, relative to the ranges around.
    """

    groups: Groups
    bits: int
    stochastic: bool = True
    zero_edge: bool = False
    storage: str = "bfloat16"

    @property
    def levels(self) -> int:
        """The greatest code."""
        return 2**self.bits - 1

    @property
    def planes(self) -> tuple[int, ...]:
        """The bits of each array that codes are split into, the highest first: (4, 1) for five.

        There are arrays of eight, four and two bits, and masks of one.
        """
        return tuple(width for width in (8, 4, 2, 1) if self.bits & width)

    @property
    def second(self) -> Groups | None:
        """Which 8-bit ranges belong together; None where there are too few, so 16 bits serve."""
        return (
            plan_groups(self.groups.grid_shape, SECOND_GROUP) if self.storage == "uint8" else None
        )

    @property
    def in_bfloat16(self) -> bool:
        """Whether both ends are stored in 16 bits."""
        return not self.zero_edge and self.second is None and self.storage != "float32"

    @property
    def stored(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of the arrays that `store` returns."""
        grid, second = self.groups.grid_shape, self.second
        if second is None:
            low = "float32" if self.storage == "float32" else "bfloat16"
            low = self._zero_dtype if self.zero_edge else low
            types = [(grid, low), (grid, "bfloat16")]
        else:
            shared = second.grid_shape
            low = self._zero_dtype if self.zero_edge else "uint8"
            relative_to = [] if self.zero_edge else [(shared, "float32"), (shared, "bfloat16")]
            types = [(grid, low), (grid, "uint8"), *relative_to, (shared, "int16")]
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types)

    @property
    def nbytes(self) -> int:
        """The bytes of all ranges."""
        return sum(entry.size * entry.dtype.itemsize for entry in self.stored)

    @property
    def _zero_dtype(self) -> str:
        return "uint16" if self.bits == 8 else "uint8"


def measure(low: jax.Array, high: jax.Array, scheme: Scheme) -> tuple[Stored, Range]:
    """The ranges of groups, rounded outwards.

    Args:
      low: the least element of each group, float32 in `groups.grid_shape`.
      high: the greatest element of each group.
      scheme: what ranges look like.

    Returns:
      The arrays that store the ranges, and what `restore` makes of them.
    """
    if scheme.in_bfloat16:
        group = Range(*affine(low, high, scheme.levels))
        return (group.low.astype(jnp.bfloat16), group.step.astype(jnp.bfloat16)), group
    stored = _store(low, high, scheme)
    return stored, restore(stored, scheme)


def _store(low: jax.Array, high: jax.Array, scheme: Scheme) -> Stored:
    second = scheme.second
    if scheme.zero_edge:
        step, twice_zero = edged(low, high, scheme.bits, scheme.stochastic)
        zero = twice_zero.astype(scheme._zero_dtype)
        if second is None:
            return zero, step.astype(jnp.bfloat16)
        return zero, *_store_steps(step, second)
    if second is not None:
        return _store_bytes(low, high, scheme.levels, second)
    low, step = affine(low, high, scheme.levels, round_low=False)
    return low, step.astype(jnp.bfloat16)


def restore(stored: Stored, scheme: Scheme) -> Range:
    """The ranges that `store` stored."""
    second = scheme.second
    if not scheme.zero_edge and second is not None:
        low, step, base, unit, greatest = stored
        return Range(_low_end(low, base, unit, second), _restore_steps(step, greatest, second))
    low, step = stored[:2]
    step = step.astype(jnp.float32) if second is None else _restore_steps(step, stored[2], second)
    if not scheme.zero_edge:
        return Range(low.astype(jnp.float32), step)
    twice_zero = low.astype(jnp.int32)
    # Exact, a product of nine bits and eight.
    return Range(-twice_zero.astype(jnp.float32) * _half(step), step, twice_zero)


def affine(
    low: jax.Array, high: jax.Array, levels: int, *, round_low: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The low end and the step of groups, such that `low <= x <= low + levels * step`.

    Both are correct to the rounding of a float32: the greatest element may lie beyond the last code
    by as much.

    Args:
      low: the least element of each group, float32.
      high: the greatest element of each group.
      levels: the greatest code.
      round_low: whether to round the low end down to bfloat16.

    Returns:
      Low ends and steps, float32; both are NaN where the group is not finite.
    """
    # Half the span, as the whole may exceed float32.
    exact_span = _half(high) - _half(low)
    low = _round_down(low) if round_low else low
    half_span = _half(high) - _half(low)
    step = _round_up(half_span * jnp.float32(2 / levels))
    if levels == 1:
        step = jnp.minimum(step, jnp.float32(GREATEST))
    # Zero for finite groups; NaN for the others, and it makes their whole range NaN.
    nothing = exact_span - exact_span
    return low + nothing, jnp.maximum(step, jnp.float32(MIN_STEP)) + nothing


def edged(
    low: jax.Array, high: jax.Array, bits: int, stochastic: bool
) -> tuple[jax.Array, jax.Array]:
    """The step of groups whose codes never cross zero, and twice the place of zero among the codes.

    A group with both signs has zero halfway between two codes. A group of one sign has its zeros at
    an end of its range, which is a code itself.

    Returns:
      Steps, float32, NaN where the group is not finite; and int32 numbers.
    """
    levels = 2**bits - 1
    # How far inside the range the outermost code lies, in steps. Rounding at random needs a code at
    # each end; with one code on each side of zero there is nothing to draw.
    inside = 0.0 if stochastic and bits > 1 else 0.5
    nothing = (low - low) + (high - high)
    below, above = (jnp.maximum(_flush(end), jnp.float32(0)) for end in (-low, high))
    mixed = (below > 0) & (above > 0)
    half_span = _half(below) + _half(above)
    share = _half(below) / jnp.where(mixed, half_span, jnp.float32(1))

    def needed(count: jax.Array) -> jax.Array:
        """The step where `count` codes lie below zero."""
        reach = (count - jnp.float32(0.5 - inside), jnp.float32(levels + 0.5 + inside) - count)
        return jnp.maximum(below / reach[0], above / reach[1])

    ideal = jnp.floor(share * jnp.float32(levels + 2 * inside) + jnp.float32(0.5 - inside))
    fewer = jnp.clip(ideal, jnp.float32(1), jnp.float32(levels))
    more = jnp.minimum(fewer + jnp.float32(1), jnp.float32(levels))
    count = jnp.where(needed(more) < needed(fewer), more, fewer)
    one_sided = jnp.maximum(below, above) / jnp.float32(levels + inside)
    step = jnp.minimum(_round_up(jnp.where(mixed, needed(count), one_sided)), jnp.float32(GREATEST))
    step = jnp.where(half_span > 0, jnp.maximum(step, jnp.float32(MIN_STEP)), jnp.float32(0))
    at_end = jnp.where(below > 0, jnp.int32(2 * levels), jnp.int32(0))
    # A count of NaN must not meet a conversion to integers.
    count = jnp.where(mixed & (nothing == 0), count, jnp.float32(1)).astype(jnp.int32)
    return step + nothing, jnp.where(mixed, jnp.int32(2) * count - jnp.int32(1), at_end)


def key_bits(group: Range, scheme: Scheme) -> jax.Array:
    """32 bits of a group's range, for the noise."""
    low_bits, step_bits = (lax.bitcast_convert_type(end, jnp.uint32) for end in group[:2])
    mixed = low_bits >> jnp.uint32(16)
    if scheme.in_bfloat16:
        # There is nothing in the lower half of either.
        return mixed | step_bits
    return (mixed ^ (low_bits & jnp.uint32(_LOWER_HALF))) | (step_bits & jnp.uint32(_UPPER_HALF))


def _store_bytes(low: jax.Array, high: jax.Array, levels: int, second: Groups) -> Stored:
    """Both ends in 8 bits: low ends between the least and the greatest of them around."""
    finite = jnp.isfinite(low) & jnp.isfinite(high)
    ends = jnp.where(finite, _flush(low), jnp.float32(0))
    # Where a group is not finite, another's end stands in for its own.
    bounds = (jnp.where(finite, ends, jnp.float32(end)) for end in (jnp.inf, -jnp.inf))
    least, greatest = (
        reduce(end.reshape(second.split_shape), axis=second.axes)
        for reduce, end in zip((jnp.min, jnp.max), bounds, strict=True)
    )
    base = jnp.where(jnp.isfinite(least), least, jnp.float32(0))
    _, unit = affine(base, jnp.where(jnp.isfinite(greatest), greatest, base), 255, round_low=False)
    unit = unit.astype(jnp.bfloat16)
    wide = _half(_spread(unit.astype(jnp.float32), second))
    distance = (_half(ends) - _half(_spread(base, second))) / jnp.where(
        wide > 0, wide, jnp.float32(1)
    )
    place = jnp.clip(jnp.floor(distance), jnp.float32(0), jnp.float32(255)).astype(jnp.uint8)
    # The quotient is rounded, so the end may lie above the least element.
    above = _low_end(place, base, unit, second) > ends
    place = place - (above & (place > 0)).astype(jnp.uint8)
    restored = _low_end(place, base, unit, second)
    _, step = affine(restored, jnp.where(finite, high, restored), levels, round_low=False)
    step = jnp.where(finite, step, jnp.float32(jnp.nan))
    codes, top = _store_steps(step, second)
    return place, codes, base, unit, top


def _low_end(place: jax.Array, base: jax.Array, unit: jax.Array, second: Groups) -> jax.Array:
    # The product is exact, so that it makes no difference whether it is contracted with the sum.
    unit = _spread(unit.astype(jnp.float32), second)
    half = place.astype(jnp.float32) * _half(unit) + _half(_spread(base, second))
    return half * jnp.float32(2)


def _store_steps(step: jax.Array, second: Groups) -> tuple[jax.Array, jax.Array]:
    """Steps in 8 bits, rounded up, relative to the greatest finite one around."""
    finite = jnp.isfinite(step)
    bits = lax.bitcast_convert_type(jnp.where(finite, step, jnp.float32(0)), jnp.int32)
    upper = (bits + jnp.int32((1 << _DROPPED_BITS) - 1)) >> jnp.int32(_DROPPED_BITS)
    largest = lax.bitcast_convert_type(jnp.float32(jnp.finfo(jnp.bfloat16).max), jnp.int32)
    upper = jnp.minimum(upper, largest >> jnp.int32(_DROPPED_BITS))
    top = jnp.max(upper.reshape(second.split_shape), axis=second.axes)
    code = upper - _spread(top, second) + jnp.int32(_GREATEST_STEP)
    code = jnp.where(upper > 0, jnp.maximum(code, jnp.int32(1)), jnp.int32(0))
    code = jnp.where(finite, code, jnp.int32(_NAN_STEP))
    return code.astype(jnp.uint8), top.astype(jnp.int16)


def _restore_steps(code: jax.Array, top: jax.Array, second: Groups) -> jax.Array:
    number = code.astype(jnp.int32)
    upper = number + _spread(top.astype(jnp.int32), second) - jnp.int32(_GREATEST_STEP)
    step = lax.bitcast_convert_type(upper << jnp.int32(_DROPPED_BITS), jnp.float32)
    step = jnp.where(number > 0, step, jnp.float32(0))
    return jnp.where(number == _NAN_STEP, jnp.float32(jnp.nan), step)


def _spread(x: jax.Array, second: Groups) -> jax.Array:
    """One entry per second group, repeated for each of its groups."""
    return jnp.broadcast_to(lax.expand_dims(x, second.axes), second.split_shape).reshape(
        second.shape
    )


def _half(x: jax.Array) -> jax.Array:
    return x * jnp.float32(0.5)


def _flush(x: jax.Array) -> jax.Array:
    """Replaces subnormal numbers and negative zero by zero."""
    return jnp.where(jnp.abs(x) < jnp.float32(LEAST_NORMAL), jnp.float32(0), x)


def _round_down(x: jax.Array) -> jax.Array:
    """The greatest finite bfloat16 number that is not above `x`, or the least one there is."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    away = (bits >> jnp.int32(31)) & jnp.int32(_LOWER_HALF)
    return jnp.maximum(_upper_half(bits + away), jnp.float32(-GREATEST))


def _round_up(x: jax.Array) -> jax.Array:
    """The least bfloat16 number that is not below a positive `x`, or infinity."""
    return _upper_half(lax.bitcast_convert_type(x, jnp.int32) + jnp.int32(_LOWER_HALF))


def _upper_half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits & jnp.int32(-0x10000), jnp.float32)
