"""Values of one and two bits in bytes: every platform's way makes the same ones."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jact_kernels import packing

SHAPES = [(), (0, 4), (5,), (64,), (3, 8), (2, 3, 24), (4, 7), (2, 8, 3), (2, 4, 5, 6)]


def values(shape: tuple[int, ...], bits: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8)


def by_hand(x: np.ndarray, bits: int) -> np.ndarray:
    """The bytes, the first value in the lowest bits."""
    x = x.reshape(x.shape or (1,))
    axis, per_byte = packing.packing_axis(x.shape, bits), 8 // bits
    x = np.moveaxis(x, axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % per_byte)])
    x = x.reshape(*x.shape[:-1], x.shape[-1] // per_byte, per_byte) << (np.arange(per_byte) * bits)
    return np.moveaxis(x.sum(-1).astype(np.uint8), -1, axis)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_made_by_hand(shape: tuple[int, ...], bits: int) -> None:
    x = values(shape, bits)
    packed = packing.pack(jnp.asarray(x), bits=bits)
    assert packed.shape == packing.packed_shape(shape, bits)
    np.testing.assert_array_equal(packed, by_hand(x, bits))
    np.testing.assert_array_equal(packing.unpack(packed, shape=shape, bits=bits), x)


@pytest.mark.parametrize(
    ("bits", "pack", "unpack"),
    [
        (2, packing._pack_fours, packing._unpack_fours),
        *((bits, packing._pack_by_product, packing._unpack_by_product) for bits in (1, 2)),
    ],
)
def test_ways_of_other_platforms(
    bits: int, pack: Callable[..., jax.Array], unpack: Callable[..., jax.Array]
) -> None:
    if pack is packing._pack_by_product:
        pack, unpack = (functools.partial(way, bits=bits) for way in (pack, unpack))
    # All bytes there are.
    everything = np.arange(256, dtype=np.uint8).reshape(2, 128)
    x = unpack(jnp.asarray(everything))
    np.testing.assert_array_equal(packing.unpack(everything, shape=x.shape, bits=bits), x)
    np.testing.assert_array_equal(pack(x), everything)


def lowered(fun: Callable[..., object], *args: object) -> str:
    return jax.jit(fun).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_several_devices_add_nothing_up() -> None:
    """On one TPU a product packs; on several it would be a sum over those that share an axis."""
    devices = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(None, "x"))
    one = jax.ShapeDtypeStruct((4, 256), "bool")
    several = jax.ShapeDtypeStruct((4, 256), "bool", sharding=split)
    pack = functools.partial(packing.pack, bits=1)
    assert "dot_general" in lowered(pack, one)
    assert "dot_general" not in lowered(pack, several)
    batched = jax.ShapeDtypeStruct((3, 4, 256), "bool")
    assert "dot_general" in lowered(jax.vmap(pack, in_axes=1), batched)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("columns", [8, 16, 24, 64])
def test_a_device_may_have_less_than_a_byte(columns: int, bits: int) -> None:
    """XLA divides its own integers of two bits wrongly there."""
    devices = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(None, None, "x"))
    x = values((4, 16, columns), bits)

    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        packed = packing.pack(x, bits=bits)
        return packed, packing.unpack(packed, shape=x.shape, bits=bits)

    packed, unpacked = jax.jit(there_and_back)(jax.device_put(x, split))
    np.testing.assert_array_equal(packed, by_hand(x, bits))
    np.testing.assert_array_equal(unpacked, x)


def test_examples_are_packed_alike_under_vmap() -> None:
    x = jnp.asarray(values((3, 5, 64), 2))
    pack = functools.partial(packing.pack, bits=2)
    got = jax.vmap(pack, in_axes=1, out_axes=1)(x)
    np.testing.assert_array_equal(got, packing.pack(x, bits=2))
