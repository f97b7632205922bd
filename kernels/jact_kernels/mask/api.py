"""Packs booleans eight to a byte, along one axis and in place."""

import functools

import jax

from jact_kernels import implementations, packing
from jact_kernels.mask import reference


def pack_mask(mask: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Packs eight neighbours along one axis into a byte, the first in the lowest bit.

    The axis is the last one if eight divides it, else another one but the leading that eight
    divides, else the one that needs the least padding. The leading axis (the batch) is packed only
    if there is no other.

    Args:
      mask: a boolean array of any shape.
      implementation: None or "auto", "xla", "pallas" or "triton"; see `use_implementation`.

    Returns:
      A uint8 array of `mask_nbytes(mask.shape)` bytes, with the axes of `mask` (one for a scalar).

    Raises:
      TypeError: `mask` is not boolean.
      ValueError: the implementation is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import pack_mask, unpack_mask
      >>> mask = jnp.arange(32).reshape(2, 16) % 3 == 0
      >>> packed = pack_mask(mask)
      >>> packed.shape, packed.dtype
      ((2, 2), dtype('uint8'))
      >>> bool((unpack_mask(packed, mask.shape) == mask).all())
      True
    """
    choices = implementations.select("pack_mask", implementation, {"shape": mask.shape})
    if mask.dtype != bool:
        raise TypeError(f"mask must be a boolean array, got dtype {mask.dtype}")
    return implementations.run(choices, reference.pack_mask, mask)


def unpack_mask(
    packed: jax.Array, shape: tuple[int, ...], *, implementation: str | None = None
) -> jax.Array:
    """Undoes `pack_mask`.

    Args:
      packed: the uint8 array that `pack_mask` returned.
      shape: the shape of the mask that was packed.
      implementation: None or "auto", "xla", "pallas" or "triton"; see `use_implementation`.

    Returns:
      A boolean array of shape `shape`.

    Raises:
      ValueError: `packed` is not a packed mask of that shape, or the implementation is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import pack_mask, unpack_mask
      >>> unpack_mask(pack_mask(jnp.array([True, False, True])), (3,)).tolist()
      [True, False, True]
    """
    choices = implementations.select("unpack_mask", implementation, {"shape": shape})
    expected = packing.packed_shape(shape, 1)
    if packed.shape != expected:
        raise ValueError(f"a mask of shape {shape} packs into {expected}, got {packed.shape}")
    xla = functools.partial(reference.unpack_mask, shape=shape)
    return implementations.run(choices, xla, packed, shape=shape)


def mask_nbytes(shape: tuple[int, ...]) -> int:
    """The bytes that a packed mask of this shape takes.

    Example:
      >>> from jact_kernels import mask_nbytes
      >>> mask_nbytes((128, 32, 32, 64)) == 128 * 32 * 32 * 64 // 8
      True
    """
    return packing.packed_nbytes(shape, 1)
