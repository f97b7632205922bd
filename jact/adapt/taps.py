"""What looks into a probe's passes: zeros that catch derivatives, and roundings."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.adapt.table import Layout
from jact.codecs import Cast, Codec, Keep, Mask, PoolResidual, Quantize
from jact.codecs.offload import on_device
from jact.engine.select import Saved

#: How a probe stores what its own backward passes read. Its ranges are stored as `_dithered` reads
#: them.
STORAGE = Quantize(bits=8)


def usable(layout: Layout, name: str) -> list[Codec]:
    """The codecs of a layout, with `Keep()` in the place of those that cannot store a residual."""
    supported = layout.supported[layout.names.index(name)]
    return [on_device(c) if s else Keep() for c, s in zip(layout.codecs, supported, strict=True)]


def round_trip(codecs: Sequence[Codec], index: Any, x: Any, seed: Any) -> Any:
    """An array as one of some codecs brings it back; which one may be known at run time only."""

    def branch(codec: Codec) -> Callable[[Any], Any]:
        return lambda x: codec.decode(codec.encode(x, seed), x.shape, x.dtype)

    if isinstance(index, int):
        return branch(codecs[index])(x)
    return lax.switch(index, [branch(codec) for codec in codecs], x)


def errs_independently(codec: Codec) -> bool:
    """Whether the errors of a residual's elements are as good as independent of each other.

    They are where rounding is random, or fine enough for its errors to look random.
    """
    codec = on_device(codec)
    if isinstance(codec, PoolResidual):
        return errs_independently(codec.residual)
    if isinstance(codec, Quantize):
        return not codec.zero_edge and (codec.stochastic or codec.bits >= 4)
    return isinstance(codec, Keep | Mask | Cast)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """An instrument that stores residuals as one codec would.

    Its operands are the position of the residual to round; the position of the codec; and the seed
    of the rounding.
    """

    layout: Layout

    def replace(self, name: str, entry: Saved, value: Any, operands: Any) -> Any:
        """The value, rounded if it is its turn."""
        del entry
        if name not in self.layout.names:
            return value
        residual, codec, seed = operands
        index = jnp.where(residual == self.layout.names.index(name), codec, 0)
        return round_trip(usable(self.layout, name), index, value, _seed(name, seed))

    def deviates(self, name: str) -> bool:
        """Nothing is added."""
        del name
        return False

    def deviate(self, name: str, entry: Saved, code: Any, operands: Any) -> None:
        """Nothing is added."""
        del name, entry, code, operands


class Turn(NamedTuple):
    """What one of a probe's passes is for.

    Attributes:
        share: the part of a codec's errors that is added to all residuals. Without errors the
            variance's statistics are collected, and with half of them those of the bias.
        codec: the position of that codec.
        seed: of its rounding.
    """

    share: Any
    codec: Any
    seed: Any


#: The numbers that `Taps` has of the bias.
BIAS = 3


@dataclasses.dataclass(frozen=True)
class Taps:
    """An instrument that adds to what the backward pass reads: zeros, or errors that a codec makes.

    The cotangent of what it adds is the derivative of the gradient with respect to the residual,
    and is reduced to statistics at once, which leave as the cotangent of an operand. Its operands
    are, by name, a float32 array `[codec]` for each residual, and None; or `[codec + 3]`, and the
    pass' `Turn`. The statistics are

    - for each codec, the sum of the rounding's variance times the squared derivative;
    - the product of the derivative and the error of the turn's codec. The derivative is taken
      halfway to what the codec brings back, so that the product is the change of the gradient,
      curvature included;
    - the squared random part of that error, and the squared error, both summed over the elements
      (zero if the errors are known to be independent).

    Attributes:
        layout: the residuals.
        codec: the codec of all turns, where there is one.
    """

    layout: Layout
    codec: int | None = None

    def replace(self, name: str, entry: Saved, value: Any, operands: Any) -> Any:
        """The value itself."""
        del name, entry, operands
        return value

    def deviates(self, name: str) -> bool:
        """Whether it is a residual of the layout."""
        return name in self.layout.names

    def deviate(self, name: str, entry: Saved, code: Any, operands: Any) -> Any:
        """What is added, and catches the derivative."""
        rows, turn = operands
        codecs, aval = usable(self.layout, name), entry.value.aval
        if turn is None:
            return _tap(aval, lambda code, d: _variances(codecs, entry, code, d))(code, rows[name])

        def statistics(residuals: Any, derivative: Any) -> Any:
            code, turn = residuals

            def of_variance(_: Any) -> Any:
                sums = _variances(codecs, entry, code, derivative)
                return jnp.concatenate([sums, jnp.zeros_like(sums, shape=BIAS)])

            def of_bias(_: Any) -> Any:
                sums = self._bias(name, entry, codecs, code, turn, derivative)
                return jnp.concatenate([jnp.zeros_like(sums, shape=len(codecs)), sums])

            return lax.cond(turn.share == 0, of_variance, of_bias, None)

        def error(x: Any) -> Any:
            rounded = round_trip(codecs, self._codec(turn), x, _seed(name, turn.seed))
            return (rounded - x) * turn.share.astype(x.dtype)

        added = lax.cond(turn.share == 0, jnp.zeros_like, error, _decoded(entry, code))
        return _tap(aval, statistics)((code, turn), rows[name]) + added

    def _codec(self, turn: Turn) -> Any:
        return turn.codec if self.codec is None else self.codec

    def _bias(
        self, name: str, entry: Saved, codecs: Any, code: Any, turn: Turn, derivative: Any
    ) -> Any:
        x = _decoded(entry, code)

        def rounded(draw: int) -> Any:
            seed = _seed(name, turn.seed + jnp.uint32(draw))
            return round_trip(codecs, self._codec(turn), x, seed).astype(jnp.float32)

        first = rounded(0)
        error = first - x.astype(jnp.float32)
        moved = jnp.sum(error * derivative.astype(jnp.float32))
        if self.codec is not None and errs_independently(codecs[self.codec]):
            return jnp.stack([moved, jnp.zeros_like(moved), jnp.zeros_like(moved)])
        random = jnp.sum(jnp.square(first - rounded(1))) / 2
        return jnp.stack([moved, random, jnp.sum(jnp.square(error))])


def _variances(codecs: Sequence[Codec], entry: Saved, code: Any, derivative: Any) -> Any:
    x = _dithered(entry, code)
    squared = jnp.square(derivative.astype(jnp.float32))
    sums: list[Any] = []
    ends: dict[Any, Any] = {}
    for codec in codecs:
        if isinstance(codec, Quantize):
            groups = codec.group_size, codec.axis
            if groups not in ends:
                ends[groups] = codec.ends(x)
            variance = codec.variance(x, ends[groups])
        else:
            variance = codec.variance(x)
        sums.append(jnp.sum(variance * squared))
        x = lax.platform_dependent(x, sums[-1], cpu=_after, default=lambda x, _: x)
    return jnp.stack(sums)


def _after(x: Any, total: Any) -> Any:
    """An array, once a sum is there: on a CPU each sum takes several arrays of the array's size.

    What it is made to depend on is whether the sum is NaN, which it is if the array is.
    """
    return jnp.where(jnp.isnan(total), total, x)


def _tap(aval: Any, statistics: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Zeros of a type, whose cotangent becomes statistics: the cotangent of a row of numbers."""

    @jax.custom_vjp
    def tap(residuals: Any, row: Any) -> Any:
        del row
        return compat.varying_like(jnp.zeros(aval.shape, aval.dtype), residuals)

    def tap_forward(residuals: Any, row: Any) -> tuple[Any, Any]:
        return tap(residuals, row), residuals

    def tap_backward(residuals: Any, cotangent: Any) -> tuple[None, Any]:
        # Else a compiler could begin before the cotangent is there.
        residuals, cotangent = lax.optimization_barrier((residuals, cotangent))
        return None, statistics(residuals, cotangent)

    tap.defvjp(tap_forward, tap_backward)
    return lambda residuals, row: tap(residuals, compat.varying_like(row, residuals))


def _decoded(entry: Saved, code: Any) -> Any:
    return entry.codec.decode(code, entry.value.aval.shape, entry.value.aval.dtype)


def _dithered(entry: Saved, code: Any) -> Any:
    """A decoded value in float32, spread evenly over the step that it was rounded to.

    What was rounded to 8 bits has no error left to make at 8 bits. The ends of a group's range
    stay: the zeros behind a ReLU are such, and make no error ever.
    """
    x = _decoded(entry, code).astype(jnp.float32)
    if entry.codec != STORAGE:
        return x
    codes, low, step = code
    step = STORAGE.decode((jnp.ones_like(codes), jnp.zeros_like(low), step), x.shape, jnp.float32)
    place = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    # Multiples of the golden ratio fill the interval evenly.
    turn = (place * jnp.uint32(0x9E3779B9)) >> jnp.uint32(8)
    uniform = turn.astype(jnp.float32) * jnp.float32(2.0**-24) - jnp.float32(0.5)
    inside = (codes > 0) & (codes < 2**STORAGE.bits - 1)
    return x + jnp.where(inside, step * uniform, jnp.float32(0))


def _seed(name: str, seed: Any) -> Any:
    return jnp.uint32(zlib.crc32(name.encode())) + seed * jnp.uint32(0x9E3779B9)
