"""What looks into a probe's passes: zeros that catch derivatives, and roundings."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class RoundingAll(Rounding):
    """An instrument that stores all residuals as one codec would.

    Its operand is the seed of the rounding.

    Attributes:
        codec: the position of the codec, a traced number if more than one is to share a program.
    """

    codec: Any

    def replace(self, name: str, entry: Saved, value: Any, operands: Any) -> Any:
        """The value, rounded."""
        del entry
        if name not in self.layout.names:
            return value
        return round_trip(usable(self.layout, name), self.codec, value, _seed(name, operands))


class _Taps:
    """An instrument that adds zeros to what the backward pass reads.

    The cotangent of the zeros is the derivative of the gradient with respect to the residual, and
    is reduced to statistics at once, which leave as the cotangent of an operand.
    """

    def __init__(self, layout: Layout):
        self._layout = layout

    def replace(self, name: str, entry: Saved, value: Any, operands: Any) -> Any:
        """The value itself."""
        del name, entry, operands
        return value

    def deviates(self, name: str) -> bool:
        """Whether it is a residual of the layout."""
        return name in self._layout.names


class VarianceTaps(_Taps):
    """For each codec, the sum of the rounding's variance times the squared derivative.

    Its operands are a float32 array `[codec]` for each residual, by name.
    """

    def deviate(self, name: str, entry: Saved, code: Any, operands: Any) -> Any:
        """Zeros that catch the derivative."""
        codecs, aval = usable(self._layout, name), entry.value.aval

        def statistics(code: Any, derivative: Any) -> Any:
            x = _dithered(entry, code)
            squared = jnp.square(derivative.astype(jnp.float32))
            sums: list[Any] = []
            for _, alike in itertools.groupby(codecs, _grouping):
                sums += [jnp.sum(codec.variance(x) * squared) for codec in alike]
                # One kind after the other, as each takes some arrays of the residual's size. Those
                # that share their groups share the reading, too.
                (x, squared), sums = lax.optimization_barrier(((x, squared), sums))
            return jnp.stack(sums)

        return _tap(aval, statistics)(code, operands[name])


class BiasTaps(_Taps):
    """For one codec, the product of the derivative and an error that the codec makes.

    The derivative is taken halfway to what the codec brings back, so that the product is the change
    of the gradient, curvature included. Its operands are a float32 array `[3]` for each residual,
    by name, for the product, the squared random part of the error and the squared error, the last
    two summed over the elements (zero for a codec whose errors are independent); and the seed of
    the rounding.
    """

    def __init__(self, layout: Layout, codec: Any):
        """Takes the position of the codec, a traced number if some are to share a program."""
        super().__init__(layout)
        self._codec = codec

    def deviate(self, name: str, entry: Saved, code: Any, operands: Any) -> Any:
        """Half the error, which catches the derivative."""
        rows, seed = operands
        codecs, aval = usable(self._layout, name), entry.value.aval
        fixed = self._codec if isinstance(self._codec, int) else None
        alone = fixed is not None and errs_independently(codecs[fixed])

        def statistics(residuals: Any, derivative: Any) -> Any:
            code, traced, seed = residuals
            codec = traced if fixed is None else fixed
            x = _decoded(entry, code)
            first = round_trip(codecs, codec, x, _seed(name, seed)).astype(jnp.float32)
            error = first - x.astype(jnp.float32)
            moved = jnp.sum(error * derivative.astype(jnp.float32))
            if alone:
                return jnp.stack([moved, jnp.zeros_like(moved), jnp.zeros_like(moved)])
            second = round_trip(codecs, codec, x, _seed(name, seed + jnp.uint32(1)))
            random = jnp.sum(jnp.square(first - second.astype(jnp.float32))) / 2
            return jnp.stack([moved, random, jnp.sum(jnp.square(error))])

        x = _decoded(entry, code)
        d = round_trip(codecs, self._codec, x, _seed(name, seed)) - x
        traced = self._codec if fixed is None else None
        zeros = _tap(aval, statistics)((code, traced, seed), rows[name])
        return zeros + d * jnp.asarray(0.5, d.dtype)


def _grouping(codec: Codec) -> Codec:
    """What quantizers have in common whose ranges are those of the same groups."""
    return dataclasses.replace(codec, bits=8) if isinstance(codec, Quantize) else codec


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
