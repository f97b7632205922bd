"""Arrays as they are."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact.codecs.base import array_nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Stores any array as it is.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs import Keep
      >>> x = jnp.ones((2, 3))
      >>> Keep().encode(x, 0) is x, Keep().nbytes(x.shape, x.dtype)
      (True, 24)
    """

    @property
    def name(self) -> str:
        """The string "keep"."""
        return "keep"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Every array is supported."""
        del shape, dtype
        return True

    def encode(self, x: jax.Array, seed: int | jax.Array) -> jax.Array:
        """Returns the array itself."""
        del seed
        return x

    def decode(self, code: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the array itself."""
        del shape, dtype
        return code

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of the array."""
        return array_nbytes(shape, dtype)

    def variance(self, x: jax.Array) -> jax.Array:
        """Zero."""
        return jnp.zeros(x.shape, jnp.float32)
