# pyright: reportMissingImports=false
"""The mask kernel in Triton, through jax-triton."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jact_kernels import compat, packing

BLOCK = 1024
"""Bytes of the packed mask, or booleans of the unpacked one, per program."""


def unsupported(shape: tuple[int, ...]) -> str | None:
    """Why these kernels cannot take a mask of this shape, or None if they can."""
    return "there is nothing to do" if 0 in shape else None


def pack_mask(mask: jax.Array) -> jax.Array:
    """Packs a boolean array of any shape into uint8."""
    packed = packing.packed_shape(mask.shape, 1)
    return compat.triton_call(
        mask,
        kernel=pack_kernel,
        out_type=jax.ShapeDtypeStruct(packed, jnp.uint8),
        grid=-(-math.prod(packed) // BLOCK),
        **_constants(mask.shape),
    )


def unpack_mask(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Unpacks uint8 into a boolean array of shape `shape`."""
    return compat.triton_call(
        packed,
        kernel=unpack_kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bool_),
        grid=-(-math.prod(shape) // BLOCK),
        **_constants(shape),
    )


def _constants(shape: tuple[int, ...]) -> dict[str, int]:
    """The mask as (OUTER, LENGTH, INNER), packed along the second of these."""
    shape = shape or (1,)
    axis = packing.packing_axis(shape, 1)
    return {
        "OUTER": math.prod(shape[:axis]),
        "LENGTH": shape[axis],
        "INNER": math.prod(shape[axis + 1 :]),
        "BLOCK": BLOCK,
    }


@triton.jit
def pack_kernel(
    mask,
    packed,
    OUTER: tl.constexpr,
    LENGTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Makes `BLOCK` bytes of the packed mask."""
    BYTES: tl.constexpr = (LENGTH + 7) // 8
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < OUTER * BYTES * INNER
    inner = index % INNER
    byte = (index // INNER) % BYTES
    outer = index // (INNER * BYTES)
    together = tl.zeros([BLOCK], tl.int32)
    for bit in tl.static_range(8):
        position = byte * 8 + bit
        where = (outer * LENGTH + position) * INNER + inner
        one = tl.load(mask + where, mask=inside & (position < LENGTH), other=0)
        together |= one.to(tl.int32) << bit
    tl.store(packed + index, together.to(tl.uint8), mask=inside)


@triton.jit
def unpack_kernel(
    packed,
    mask,
    OUTER: tl.constexpr,
    LENGTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Makes `BLOCK` booleans of the mask."""
    BYTES: tl.constexpr = (LENGTH + 7) // 8
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < OUTER * LENGTH * INNER
    inner = index % INNER
    position = (index // INNER) % LENGTH
    outer = index // (INNER * LENGTH)
    where = (outer * BYTES + position // 8) * INNER + inner
    byte = tl.load(packed + where, mask=inside, other=0).to(tl.int32)
    one = (byte >> (position % 8).to(tl.int32)) & 1
    tl.store(mask + index, one.to(tl.int1), mask=inside)
