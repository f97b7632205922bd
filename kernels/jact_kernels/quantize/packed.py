"""Codes as the bytes that hold them: what kernels write, and XLA lays out so by itself."""

import jax
import jax.numpy as jnp
from jax import lax

from jact_kernels.quantize.ranges import Scheme
from jact_kernels.quantize.reference import CODE_DTYPES


def as_codes(packed: jax.Array, scheme: Scheme) -> jax.Array:
    """Bytes, the first code in the lowest bits, as an array of the codes' own dtype.

    On a CPU and a GPU the bytes stay where they are.
    """
    shape = scheme.groups.shape
    if scheme.bits not in CODE_DTYPES:
        return packed.reshape(*shape[:-1], shape[-1] * scheme.bits // 8)
    if scheme.bits < 8:
        packed = lax.bitcast_convert_type(packed, CODE_DTYPES[scheme.bits])
    return packed.reshape(shape)


def as_bytes(codes: jax.Array, scheme: Scheme) -> jax.Array:
    """Undoes `as_codes`, up to the shape; eight divides the bits of the last axis."""
    if codes.dtype == jnp.uint8:
        return codes
    together = codes.reshape(*codes.shape[:-1], -1, 8 // scheme.bits)
    return lax.bitcast_convert_type(together, jnp.uint8)
