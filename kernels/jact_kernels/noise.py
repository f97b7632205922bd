"""Counter-based noise: a hash of a seed, an element's index and its group's range.

No key is needed, and nothing is stored: whoever has the same three things gets the same noise. The
range differs from step to step, hence so does the noise. The two rounds are those of lowbias32
(Wellons, "Prospecting for hash functions", 2018) without the last shift, which only mends the low
bits; those are not used here.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Seed = int | np.integer | jax.Array
"""A Python integer, or a scalar array of an integer dtype; taken modulo 2**32."""

INDEX_FACTOR = 0x9E3779B1
"""What a row-major index is multiplied by, so that neighbours differ in many bits."""


SEED_FACTOR = 0x85EBCA6B
"""What a seed is multiplied by, likewise."""


def random_bits(
    shape: tuple[int, ...], seed: Seed, group_bits: jax.Array | None = None
) -> jax.Array:
    """Random bits, one word per element, the same for the same arguments everywhere.

    Only the upper 24 bits are random enough to be used.

    Args:
      shape: the shape of the result.
      seed: which stream; different seeds give independent noise.
      group_bits: uint32, of a shape that broadcasts to `shape` without new axes; mixed into the
        seed. Elements with different values get independent noise.

    Returns:
      A uint32 array of shape `shape`.

    Example:
      >>> from jact_kernels.noise import random_bits
      >>> random_bits((2, 3), seed=1).shape
      (2, 3)
    """
    if group_bits is None:
        group_bits = jnp.zeros((1,) * len(shape), jnp.uint32)
    return random_bits_of(group_key(seed, group_bits), shape)


def group_key(seed: Seed, group_bits: jax.Array) -> jax.Array:
    """One key per group: a hash as long as the one per element, for far fewer entries."""
    stream = _as_uint32(seed) * jnp.uint32(SEED_FACTOR)
    return finalise(group_bits ^ jnp.broadcast_to(stream, group_bits.shape))


def random_bits_of(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random bits, one word per element, from the keys that `group_key` made."""
    return finalise(_index(shape) ^ jnp.broadcast_to(key, shape))


def uniform(shape: tuple[int, ...], seed: Seed, group_bits: jax.Array | None = None) -> jax.Array:
    """Uniform noise in [0, 1) with 24 random bits per element.

    Args:
      shape: the shape of the result.
      seed: which stream; see `random_bits`.
      group_bits: uint32, broadcastable to `shape`; see `random_bits`.

    Returns:
      A float32 array of shape `shape`.

    Example:
      >>> from jact_kernels.noise import uniform
      >>> u = uniform((1000,), seed=3)
      >>> bool((u >= 0).all() and (u < 1).all())
      True
    """
    bits = random_bits(shape, seed, group_bits) >> jnp.uint32(8)
    # Signed integers convert to float32 in one instruction, unsigned ones in several.
    return bits.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2**-24)


def _as_uint32(seed: Seed) -> jax.Array:
    if isinstance(seed, int):
        return jnp.uint32(seed % 2**32)
    return lax.convert_element_type(seed, jnp.uint32)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """The row-major index of each element, spread by an odd factor, modulo 2**32.

    It is built axis by axis rather than by reshaping one long iota, which a compiler that shards
    the array would have to hold whole.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = INDEX_FACTOR
    for axis in reversed(range(len(shape))):
        position = lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index + position * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def spread_index(index: jax.Array) -> jax.Array:
    """The int32 row-major index of elements, as `random_bits_of` mixes it with the key."""
    return lax.bitcast_convert_type(index, jnp.uint32) * jnp.uint32(INDEX_FACTOR)


def finalise(x: jax.Array) -> jax.Array:
    """Spreads every input bit over the upper output bits."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    return (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
