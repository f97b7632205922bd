"""Averages of a few neighbours, in a few bits: less than one bit per element."""

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from jact.codecs.pool import Pool
from jact.codecs.quantize import Quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average:
    """Stores the mean of `neighbours` neighbours along one axis, quantised.

    At the default four neighbours and 2 bits that is half a bit per element, and an eighth of one
    for the ranges. The idea is that of Woo et al., "ALAM" (ICLR 2024), whose neighbours are those
    of the flattened array; here they lie along one axis, so that nothing is copied or crosses a
    shard.

    Like `Pool` it is biased: what varies among the neighbours is lost. It is for values that matter
    little, where memory is all.

    Raises:
      ValueError: `neighbours` is below two, or a field of `Quantize` is wrong.

    Example:
      >>> from jact.codecs import Average
      >>> Average().nbytes((16, 512, 768), "float32") * 8 / (16 * 512 * 768)
      0.625
    """

    #: How many neighbours share a mean.
    neighbours: int = 4
    #: Bits of each mean.
    bits: int = 2
    #: About how many means share a range.
    group_size: int = 64
    #: Along which axis neighbours lie; None is the last but one (a row of an image, a sequence), or
    #: the last where there are two axes or one.
    axis: int | None = None

    def __post_init__(self) -> None:
        if self.neighbours < 2:
            raise ValueError(f"neighbours must be at least 2, got {self.neighbours}")
        _ = self._quantize  # Raises where a field is wrong.

    @property
    def name(self) -> str:
        """Such as "avg4-int2", with an axis if one is given."""
        axis = "" if self.axis is None else f"@{self.axis}"
        return f"avg{self.neighbours}{axis}-{self._quantize.name}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array whose means can be quantised."""
        return len(shape) > 0 and self._pool(shape).supports(shape, dtype)

    def encode(self, x: jax.Array, seed: int | jax.Array) -> Any:
        """Returns the code of the means."""
        return self._pool(x.shape).encode(x, seed)

    def decode(self, code: Any, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the means, each repeated for its neighbours."""
        return self._pool(shape).decode(code, shape, dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of the means' code."""
        return self._pool(shape).nbytes(shape, dtype)

    def variance(self, x: jax.Array) -> jax.Array:
        """The expected squared error, bias included; see `Pool.variance`."""
        return self._pool(x.shape).variance(x)

    def _pool(self, shape: tuple[int, ...]) -> Pool:
        axis = (-2 if len(shape) > 2 else -1) if self.axis is None else self.axis
        return Pool(window=self.neighbours, axes=(axis,), inner=self._quantize)

    @property
    def _quantize(self) -> Quantize:
        return Quantize(bits=self.bits, group_size=self.group_size)
