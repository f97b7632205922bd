"""Averages in 16 bits and what they leave over in a few."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact.codecs.cast import Cast
from jact.codecs.pool import Pool
from jact.codecs.quantize import Quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolResidual:
    """Stores averages over windows in bfloat16, and the difference to them quantised.

    The low frequencies of an image carry most of it; without them what is left has a narrow range,
    which a few bits resolve finely. The difference is that to the averages as they are stored, so
    the result is unbiased. The idea is that of Wang et al., "DIVISION" (ICML 2023).

    It gains where neighbours are alike and a window is smaller than a group or of another shape:
    shifting a whole group changes nothing. So arrays need spatial axes, as for `Pool`.

    Raises:
      ValueError: a field is wrong; see `Pool` and `Quantize`.

    Example:
      >>> from jact.codecs import PoolResidual
      >>> PoolResidual().nbytes((128, 32, 32, 64), "float32") * 8 / (128 * 32 * 32 * 64)
      2.5
    """

    # The averages cost 16 bits for each window.
    window: int = 8
    axes: tuple[int, ...] | None = None
    # How the difference is quantised.
    bits: int = 2
    group_size: int = 128

    def __post_init__(self) -> None:
        # The parts check the fields.
        object.__setattr__(self, "axes", self._pool.axes)
        _ = self._residual

    @property
    def name(self) -> str:
        """Such as "hybrid2", with what differs from the default appended: "hybrid2w4/64"."""
        window = "" if self.window == 8 else f"w{self.window}"
        group = "" if self.group_size == 128 else f"/{self.group_size}"
        axes = "" if self.axes is None else f"@{','.join(map(str, self.axes))}"
        return f"hybrid{self.bits}{window}{group}{axes}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array with spatial axes that divides into groups."""
        return self._pool.supports(shape, dtype) and self._residual.supports(shape, dtype)

    def encode(self, x: jax.Array, seed: int | jax.Array) -> tuple[Any, Any]:
        """Returns the averages and the code of the difference."""
        pooled = self._pool.encode(x, seed)
        return pooled, self._residual.encode(self._difference(x, pooled), seed)

    def decode(self, code: tuple[Any, Any], shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the sum of both."""
        pooled, residual = code
        average = self._pool.decode(pooled, shape, jnp.float32)
        difference = self._residual.decode(residual, shape, jnp.float32)
        limit = jnp.float32(min(float(jnp.finfo(kind).max) for kind in (jnp.float32, dtype)))
        total = jnp.clip(average + difference, -limit, limit)
        return jnp.where(jnp.isfinite(average), total, jnp.float32(jnp.nan)).astype(dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of both."""
        return self._pool.nbytes(shape, dtype) + self._residual.nbytes(shape, dtype)

    def variance(self, x: jax.Array) -> jax.Array:
        """The variance of the difference's stochastic rounding."""
        return self._residual.variance(self._difference(x, self._pool.encode(x, 0)))

    def _difference(self, x: jax.Array, pooled: Any) -> jax.Array:
        x = x.astype(jnp.float32)
        average = self._pool.decode(pooled, x.shape, jnp.float32)
        # Beyond float32 only where the array all but is; its own infinities are not hidden.
        limit = jnp.float32(jnp.finfo(jnp.float32).max)
        difference = jnp.clip(x - average, -limit, limit)
        return jnp.where(jnp.isfinite(x), difference, jnp.float32(jnp.nan))

    @property
    def _pool(self) -> Pool:
        return Pool(window=self.window, axes=self.axes, inner=Cast())

    @property
    def _residual(self) -> Quantize:
        return Quantize(bits=self.bits, group_size=self.group_size)
