"""Averages, and what they leave over in a few bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact.codecs.base import Codec, materialized
from jact.codecs.pool import Pool
from jact.codecs.quantize import Quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolResidual:
    """Stores averages over windows, and the difference to them quantised in a few bits.

    The low frequencies of an image carry most of it; without them what is left has a narrow range,
    which a few bits resolve finely. The difference is that to the averages as they are decoded, so
    the result is unbiased. The idea is that of Wang et al., "DIVISION" (ICML 2023), which has
    windows of 8 x 8 with averages in bfloat16 (`PoolResidual(window=8, average=Cast())`); smaller
    windows with averages in 4 bits take as much and leave less over.

    It gains where neighbours are alike and a window is smaller than a group or of another shape:
    shifting a whole group changes nothing. So arrays need spatial axes, as for `Pool`.

    Raises:
      ValueError: a field is wrong; see `Pool` and `Quantize`.

    Example:
      >>> from jact.codecs import PoolResidual
      >>> round(PoolResidual().nbytes((128, 32, 32, 64), "float32") * 8 / (128 * 32 * 32 * 64), 2)
      2.58
    """

    #: How many neighbours along each axis share an average.
    window: int = 4
    #: Those axes, as for `Pool`.
    axes: tuple[int, ...] | None = None
    #: How the averages are stored.
    average: Codec = Quantize(bits=4, ranges="uint8")
    #: How the difference is stored.
    residual: Codec = Quantize(bits=2, ranges="uint8")

    def __post_init__(self) -> None:
        # The part checks the fields.
        object.__setattr__(self, "axes", self._pool.axes)

    @property
    def name(self) -> str:
        """Such as "hybrid2" for the default; else the averages' codec and the difference's."""
        if self == PoolResidual():
            return "hybrid2"
        return f"{self._pool.name}+{self.residual.name}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array with spatial axes that divides into groups."""
        return self._pool.supports(shape, dtype) and self.residual.supports(shape, dtype)

    def encode(self, x: jax.Array, seed: int | jax.Array) -> tuple[Any, Any]:
        """Returns the averages and the code of the difference."""
        pooled = self._pool.encode(x, seed)
        # The ranges differ, and hence the noise.
        return pooled, self.residual.encode(materialized(self._difference(x, pooled)), seed)

    def decode(self, code: tuple[Any, Any], shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the sum of both."""
        pooled, residual = code
        average = self._pool.decode(pooled, shape, jnp.float32)
        difference = self.residual.decode(residual, shape, jnp.float32)
        limit = jnp.float32(min(float(jnp.finfo(kind).max) for kind in (jnp.float32, dtype)))
        total = jnp.clip(average + difference, -limit, limit)
        return jnp.where(jnp.isfinite(average), total, jnp.float32(jnp.nan)).astype(dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of both."""
        return self._pool.nbytes(shape, dtype) + self.residual.nbytes(shape, dtype)

    def variance(self, x: jax.Array) -> jax.Array:
        """The error that the difference's codec makes, at one draw of the averages' noise.

        The averages' own error is part of the difference, and made good by it.
        """
        return self.residual.variance(self._difference(x, self._pool.encode(x, 0)))

    def _difference(self, x: jax.Array, pooled: Any) -> jax.Array:
        x = x.astype(jnp.float32)
        average = self._pool.decode(pooled, x.shape, jnp.float32)
        # Beyond float32 only where the array all but is; its own infinities are not hidden.
        limit = jnp.float32(jnp.finfo(jnp.float32).max)
        difference = jnp.clip(x - average, -limit, limit)
        return jnp.where(jnp.isfinite(x), difference, jnp.float32(jnp.nan))

    @property
    def _pool(self) -> Pool:
        return Pool(window=self.window, axes=self.axes, inner=self.average)
