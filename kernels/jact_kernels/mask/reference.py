"""The mask kernel in plain JAX, which XLA fuses into its neighbours."""

import jax

from jact_kernels import packing


def pack_mask(mask: jax.Array) -> jax.Array:
    """Packs a boolean array of any shape into uint8."""
    return packing.pack(mask, bits=1)


def unpack_mask(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Unpacks uint8 into a boolean array of shape `shape`."""
    return packing.unpack(packed, shape=shape, bits=1).astype(bool)
