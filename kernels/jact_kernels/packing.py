"""Values of one or two bits as bytes, in plain JAX, which XLA fuses into its neighbours.

XLA has integers of two bits, but its compiler for TPUs takes them hardly anywhere, and on a CPU
they fill whole bytes inside of loops. What goes from one pass to the other is therefore bytes.
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jact_kernels import compat

type _Way = Callable[[jax.Array], jax.Array]

MOST_COLUMNS = 4096
"""What one product packs on a TPU; it costs a quarter, or an eighth, of this for each value."""


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """The shape of the bytes; a scalar is packed as one axis of one entry."""
    shape = shape or (1,)
    axis = packing_axis(shape, bits)
    return (*shape[:axis], -(-shape[axis] * bits // 8), *shape[axis + 1 :])


def packed_nbytes(shape: tuple[int, ...], bits: int) -> int:
    """How many bytes that are."""
    return math.prod(packed_shape(shape, bits))


def packing_axis(shape: tuple[int, ...], bits: int) -> int:
    """The axis to pack along, for a shape of at least one axis.

    Padding an axis costs its relative growth, so of the axes that may be packed the one that grows
    least is taken; one that whole bytes divide grows by nothing. The last axis wins a tie.
    """
    per_byte = 8 // bits
    candidates = range(len(shape) - 1, 0, -1) if len(shape) > 1 else range(1)
    return min(candidates, key=lambda axis: -shape[axis] % per_byte / max(shape[axis], 1))


# Under `jit`, arrays of equal shapes share one trace.
@functools.partial(jax.jit, static_argnames="bits")
def pack(values: jax.Array, *, bits: int) -> jax.Array:
    """Packs values below `2**bits`, of any dtype and shape, into uint8, the first one lowest."""
    per_byte = 8 // bits
    values = values.reshape(values.shape or (1,))
    axis = packing_axis(values.shape, bits)
    if missing := -values.shape[axis] % per_byte:
        padding = [(0, 0)] * values.ndim
        padding[axis] = (0, missing)
        values = jnp.pad(values, padding)

    def by_shifts(values: jax.Array) -> jax.Array:
        split = _split(values, axis, per_byte).astype(jnp.uint8)
        shifted = split << _shifts(split.shape, axis + 1, bits)
        return jnp.sum(shifted, axis=axis + 1, dtype=jnp.uint8)

    ways = {"cpu": _pack_alone, "cuda": _pack_fours} if bits == 2 else {}
    if values.shape[-1] <= MOST_COLUMNS:
        ways["tpu"] = functools.partial(_pack_by_product, bits=bits)
    return _by_platform(values, by_shifts, ways if axis == values.ndim - 1 else {})


@functools.partial(jax.jit, static_argnames=("shape", "bits"))
def unpack(packed: jax.Array, *, shape: tuple[int, ...], bits: int) -> jax.Array:
    """Unpacks the values of an array of shape `shape` from bytes, as uint8."""
    per_byte = 8 // bits
    padded = shape or (1,)
    axis = packing_axis(padded, bits)
    length = packed.shape[axis] * per_byte

    def by_shifts(packed: jax.Array) -> jax.Array:
        split = (*packed.shape[: axis + 1], per_byte, *packed.shape[axis + 1 :])
        repeated = jnp.broadcast_to(jnp.expand_dims(packed, axis + 1), split)
        values = _cut(repeated, _shifts(split, axis + 1, bits), bits)
        return values.reshape((*padded[:axis], length, *padded[axis + 1 :]))

    ways = {"cpu": _unpack_alone, "cuda": _unpack_fours} if bits == 2 else {}
    if length <= MOST_COLUMNS:
        ways["tpu"] = functools.partial(_unpack_by_product, bits=bits)
    values = _by_platform(packed, by_shifts, ways if axis == len(padded) - 1 else {})
    return lax.slice_in_dim(values, 0, padded[axis], axis=axis).reshape(shape)


def _by_platform(x: jax.Array, by_shifts: _Way, ways: Mapping[str, _Way]) -> jax.Array:
    """What is fast on a platform's single device, and shifts elsewhere, which can be divided.

    Over several devices a product along a shared axis would be a sum among them, and XLA divides
    integers of two bits wrongly where a device has less than a byte of them.
    """
    chosen = {
        platform: functools.partial(compat.by_devices, one=way, several=by_shifts)
        for platform, way in ways.items()
    }
    return lax.platform_dependent(x, default=by_shifts, **chosen)


# XLA packs integers of two bits in the same order.
def _pack_fours(values: jax.Array) -> jax.Array:
    split = _split(values, values.ndim - 1, 4)
    return lax.bitcast_convert_type(split.astype(jnp.uint2), jnp.uint8)


def _unpack_fours(packed: jax.Array) -> jax.Array:
    values = lax.bitcast_convert_type(packed, jnp.uint2).astype(jnp.uint8)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 4)


# A loop that writes less than a byte at a time is not vectorised on a CPU. Keeping all arithmetic
# out of it makes the whole many times faster there; elsewhere it would cost a copy.
def _pack_alone(values: jax.Array) -> jax.Array:
    return lax.optimization_barrier(_pack_fours(lax.optimization_barrier(values.astype(jnp.uint8))))


def _unpack_alone(packed: jax.Array) -> jax.Array:
    return lax.optimization_barrier(_unpack_fours(packed))


# An axis of four or eight fills as many of a TPU's 128 lanes, and moving values between lanes takes
# many passes; a product of matrices moves them for nothing. It is exact, as it adds integers, of
# whose results the lowest eight bits count.
def _pack_by_product(values: jax.Array, bits: int) -> jax.Array:
    own, shifts = _bytes_of(values.shape[-1], bits)
    weights = jnp.where(own, jnp.expand_dims(jnp.int32(1) << shifts, 1), jnp.int32(0))
    return _product(values, weights).astype(jnp.uint8)


def _unpack_by_product(packed: jax.Array, bits: int) -> jax.Array:
    own, shifts = _bytes_of(packed.shape[-1] * 8 // bits, bits)
    repeated = _product(packed, own.T)
    return _cut(repeated, jnp.broadcast_to(shifts, repeated.shape), bits).astype(jnp.uint8)


def _product(values: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.matmul(
        values.astype(jnp.int8),
        weights.astype(jnp.int8),
        precision=lax.Precision.DEFAULT,  # Whatever the user's is for products of floats.
        preferred_element_type=jnp.int32,
    )


def _bytes_of(columns: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """Which byte holds each column, as booleans (columns, bytes), and how far it is shifted."""
    per_byte = 8 // bits
    shape = columns, columns // per_byte
    column, byte = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    shifts = lax.iota(jnp.int32, columns) % jnp.int32(per_byte) * jnp.int32(bits)
    return column // jnp.int32(per_byte) == byte, shifts


def _cut(values: jax.Array, shifts: jax.Array, bits: int) -> jax.Array:
    """The bits from a place on."""
    return (values >> shifts) & jnp.asarray(2**bits - 1, values.dtype)


def _split(values: jax.Array, axis: int, per_byte: int) -> jax.Array:
    shape = values.shape
    return values.reshape(*shape[:axis], shape[axis] // per_byte, per_byte, *shape[axis + 1 :])


def _shifts(shape: tuple[int, ...], axis: int, bits: int) -> jax.Array:
    """How far each value is shifted within its byte."""
    return lax.broadcasted_iota(jnp.uint8, shape, axis) * jnp.uint8(bits)
