"""Booleans, exactly, at one bit each."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jact_kernels as kernels
from jact.codecs.base import dtype_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Stores boolean arrays, such as ReLU and dropout masks, eight to a byte.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs import Mask
      >>> mask = jnp.arange(64).reshape(4, 16) % 5 == 0
      >>> Mask().nbytes(mask.shape, mask.dtype)
      8
      >>> bool((Mask().decode(Mask().encode(mask, 0), mask.shape, bool) == mask).all())
      True
    """

    @property
    def name(self) -> str:
        """The string "mask"."""
        return "mask"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a boolean array; any shape will do."""
        del shape
        return dtype_of(dtype).name == "bool"

    def encode(self, x: jax.Array, seed: int | jax.Array) -> jax.Array:
        """Returns the packed mask, uint8; the seed makes no difference."""
        del seed
        return kernels.pack_mask(x)

    def decode(self, code: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the mask, bit for bit."""
        return kernels.unpack_mask(code, shape).astype(dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """An eighth of the elements, rounded up along one axis."""
        del dtype
        return kernels.mask_nbytes(shape)

    def variance(self, x: jax.Array) -> jax.Array:
        """Zero."""
        return jnp.zeros(x.shape, jnp.float32)
