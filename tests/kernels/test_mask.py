"""Masks: packed and unpacked bit for bit, in place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jact_kernels import mask_nbytes, pack_mask, unpack_mask

SHAPES = [(), (0,), (5,), (64,), (3, 0), (0, 9), (4, 16), (16, 5), (2, 24, 7), (2, 3, 4, 5, 6)]


def random_mask(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(shape: tuple[int, ...]) -> None:
    mask = random_mask(shape)
    packed = jax.jit(pack_mask)(mask)
    assert packed.dtype == jnp.uint8
    assert packed.nbytes == mask_nbytes(shape)
    restored = jax.jit(unpack_mask, static_argnums=1)(packed, shape)
    assert restored.shape == shape and restored.dtype == bool
    assert (restored == mask).all()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 10), max_size=5).map(tuple), st.integers(0, 99))
def test_round_trip_of_any_shape(shape: tuple[int, ...], seed: int) -> None:
    mask = random_mask(shape, seed)
    restored = jax.jit(lambda mask: unpack_mask(pack_mask(mask), shape))(mask)
    assert np.array_equal(restored, mask)


@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ((8, 32, 32, 64), (8, 32, 32, 8)),
        ((8, 16, 16, 10), (8, 16, 2, 10)),
        ((8, 16, 9, 10), (8, 2, 9, 10)),
        ((8, 31, 9), (8, 4, 9)),  # 31 needs the least padding; the batch axis is not packed.
        ((8, 5), (8, 1)),
        ((13,), (2,)),
        ((), (1,)),
    ],
)
def test_packed_along_one_axis(shape: tuple[int, ...], packed: tuple[int, ...]) -> None:
    assert pack_mask(random_mask(shape)).shape == packed
    assert mask_nbytes(shape) == math.prod(packed)


def test_bits_lie_in_order() -> None:
    mask = jnp.array([True, False, False, True, False, False, False, False, True])
    assert pack_mask(mask).tolist() == [0b1001, 0b1]


def test_transformations() -> None:
    masks = random_mask((3, 4, 16, 6))
    rows = [pack_mask(mask) for mask in masks]
    assert (jax.vmap(pack_mask)(masks) == jnp.stack(rows)).all()
    _, scanned = jax.lax.scan(lambda carry, mask: (carry, pack_mask(mask)), None, masks)
    assert (scanned == jnp.stack(rows)).all()
    restored = jax.vmap(lambda packed: unpack_mask(packed, (4, 16, 6)))(scanned)
    assert (restored == masks).all()


@pytest.mark.parametrize("shape", [(8, 64, 32), (8, 30, 5), (1001,)])
def test_compiled_bytes(shape: tuple[int, ...]) -> None:
    compiled = jax.jit(pack_mask).lower(jax.ShapeDtypeStruct(shape, bool)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes == mask_nbytes(shape)


def test_errors() -> None:
    with pytest.raises(TypeError, match="mask must be a boolean array, got dtype float32"):
        pack_mask(jnp.ones(8))
    with pytest.raises(ValueError, match=r"packs into \(2, 2\), got \(4,\)"):
        unpack_mask(jnp.zeros(4, jnp.uint8), (2, 16))
    with pytest.raises(ValueError, match="implementation must be one of .*'xla'.*, got 'cuda'"):
        pack_mask(jnp.ones(8, bool), implementation="cuda")
