"""The mask kernel in plain JAX, which XLA fuses into its neighbours."""

import jax
import jax.numpy as jnp
from jax import lax

BITS = 8
"""Booleans per byte."""


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the packed mask; a scalar is packed as one axis of one entry."""
    shape = shape or (1,)
    axis = packing_axis(shape)
    return (*shape[:axis], -(-shape[axis] // BITS), *shape[axis + 1 :])


def packing_axis(shape: tuple[int, ...]) -> int:
    """The axis to pack along, for a shape of at least one axis.

    Padding an axis costs its relative growth, so of the axes that may be packed the one that grows
    least is taken; one that eight divides grows by nothing. The last axis wins a tie.
    """
    candidates = range(len(shape) - 1, 0, -1) if len(shape) > 1 else range(1)
    return min(candidates, key=lambda axis: -shape[axis] % BITS / max(shape[axis], 1))


def pack_mask(mask: jax.Array) -> jax.Array:
    """Packs a boolean array of any shape into uint8."""
    mask = mask.reshape(mask.shape or (1,))
    axis = packing_axis(mask.shape)
    padding = [(0, 0)] * mask.ndim
    padding[axis] = (0, -mask.shape[axis] % BITS)
    bits = jnp.pad(mask, padding) if padding[axis][1] else mask
    bits = bits.reshape(_split_shape(bits.shape, axis)).astype(jnp.uint8)
    return jnp.sum(bits << _positions(bits.shape, axis + 1), axis=axis + 1, dtype=jnp.uint8)


def unpack_mask(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Unpacks uint8 into a boolean array of shape `shape`."""
    padded = shape or (1,)
    axis = packing_axis(padded)
    split = (*packed.shape[: axis + 1], BITS, *packed.shape[axis + 1 :])
    repeated = jnp.broadcast_to(jnp.expand_dims(packed, axis + 1), split)
    bits = (repeated >> _positions(split, axis + 1)) & jnp.uint8(1)
    length = packed.shape[axis] * BITS
    bits = bits.reshape((*padded[:axis], length, *padded[axis + 1 :]))
    return lax.slice_in_dim(bits, 0, padded[axis], axis=axis).astype(bool).reshape(shape)


def _split_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // BITS, BITS, *shape[axis + 1 :])


def _positions(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The place of each boolean within its byte."""
    return lax.broadcasted_iota(jnp.uint8, shape, axis)
