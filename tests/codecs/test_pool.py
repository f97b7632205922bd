"""Codecs that average: exact on what they can hold, and no worse than they say elsewhere."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.images import natural
from jact.codecs import Average, Cast, Codec, Pool, PoolResidual, Quantize
from jact_kernels import average_pool, pooled_shape, repeat_windows


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def decoded(codec: Codec, x: Any, seed: int = 0) -> np.ndarray:
    x = jnp.asarray(x)

    def round_trip(x: jax.Array) -> jax.Array:
        return codec.decode(codec.encode(x, seed), x.shape, x.dtype)

    return np.asarray(jax.jit(round_trip)(x))


def averages(x: np.ndarray, window: int, axes: tuple[int, ...]) -> np.ndarray:
    """Each element's window average, by one loop over the windows."""
    out = np.empty_like(x, np.float64)
    for place in np.ndindex(*pooled_shape(x.shape, window=window, axes=axes)):
        cut = tuple(
            slice(i * window, (i + 1) * window) if axis in axes else i
            for axis, i in enumerate(place)
        )
        out[cut] = x[cut].astype(np.float64).mean()
    return out


@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 6, 8, 3), (1, 2)), ((2, 7, 5, 3), (1, 2)), ((2, 3, 7, 1), (2,)), ((3, 10, 2), (1,))],
)
def test_decodes_to_window_averages(
    shape: tuple[int, ...], axes: tuple[int, ...], window: int
) -> None:
    x = normal(shape)
    y = decoded(Pool(window=window, axes=axes), x)
    np.testing.assert_allclose(y, averages(x, window, axes), rtol=1e-5, atol=1e-6)
    # Averages survive a second time, and deviations from them are the whole error.
    np.testing.assert_allclose(decoded(Pool(window=window, axes=axes), y), y, rtol=1e-5, atol=1e-6)
    variance = Pool(window=window, axes=axes).variance(jnp.asarray(x))
    np.testing.assert_allclose(variance, np.square(y - x), rtol=1e-3, atol=1e-6)


def test_axes_by_rank() -> None:
    codec = Pool(window=2)
    expected = {(4, 8): None, (4, 8, 6): (4, 4, 6), (4, 8, 8, 6): (4, 4, 4, 6)}
    expected[(4, 8, 8, 8, 6)] = (4, 4, 4, 4, 6)
    for shape, pooled in expected.items():
        assert codec.supports(shape, "float32") == (pooled is not None)
        if pooled is not None:
            assert codec.nbytes(shape, "bfloat16") == 2 * math.prod(pooled)
    channels_first = Pool(window=2, axes=(-2, -1))
    assert channels_first.nbytes((4, 6, 8, 8), "float32") == 4 * 4 * 6 * 4 * 4
    assert not Pool(axes=(1, -1)).supports((4, 8), "float32")  # The same axis.
    assert not Pool(axes=(3,)).supports((4, 8, 8), "float32")
    assert not codec.supports((4, 8, 8, 6), "int32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_finite_stays_finite(dtype: str) -> None:
    limit = float(jnp.finfo(dtype).max)
    x = jnp.full((2, 6, 6, 64), limit, dtype).at[0, ::3].set(-limit)
    for codec in (Pool(), Pool(window=3), Pool(inner=Cast()), Average(), PoolResidual()):
        assert np.isfinite(decoded(codec, x).astype(np.float32)).all()


def test_infinities_and_nan_are_not_hidden() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x = normal((2, 32, 32, 8))
        x[0, 3, 3, 5] = bad
        for codec in (Pool(), Average(), PoolResidual(), PoolResidual(average=Cast())):
            y = decoded(codec, x)
            assert not np.isfinite(y[0, 3, 3, 5])
            assert np.isfinite(y[1]).all() and np.isfinite(np.delete(y[0], 5, axis=-1)).all()


def test_average_works_in_every_rank() -> None:
    codec = Average(neighbours=4, bits=2)
    for shape in [(4096,), (8, 512), (4, 256, 16), (2, 8, 32, 16), (2, 3, 4, 32, 16)]:
        assert codec.supports(shape, "float32")
        bits = codec.nbytes(shape, "float32") * 8 / math.prod(shape)
        assert bits < 1
    assert not codec.supports((), "float32")
    assert Average(axis=-1).nbytes((4, 64, 512), "float32") < 4 * 64 * 512 / 8


@pytest.mark.parametrize(
    "codec", [Pool(inner=Quantize(bits=4)), Average(), PoolResidual(), PoolResidual(window=8)]
)
def test_error_is_what_the_model_says(codec: Codec) -> None:
    x = jnp.asarray(natural(normal((4, 32, 32, 8))))
    seeds = jnp.arange(64, dtype=jnp.uint32)
    one = functools.partial(lambda s: codec.decode(codec.encode(x, s), x.shape, x.dtype))
    error = np.asarray(jax.jit(jax.vmap(one))(seeds), np.float64) - np.asarray(x)
    expected = np.asarray(jax.jit(codec.variance)(x), np.float64)
    # Over windows of the batch rather than in the mean alone.
    for rows in range(4):
        assert np.square(error[:, rows]).mean() == pytest.approx(expected[rows].mean(), rel=0.1)
    if isinstance(codec, PoolResidual):
        bias = np.square(error.mean(0)).mean() * 64
        assert bias == pytest.approx(expected.mean(), rel=0.1)  # None: draws average out.


def test_residual_beats_plain_bits_on_images() -> None:
    x = natural(normal((8, 32, 32, 16)))
    plain, hybrid = Quantize(bits=2), PoolResidual()
    sizes = [codec.nbytes(x.shape, x.dtype) for codec in (hybrid, plain)]
    assert sizes[0] < 1.05 * sizes[1]
    errors = [np.square(decoded(codec, x) - x).mean() for codec in (hybrid, plain)]
    assert errors[0] < 0.75 * errors[1]


def test_errors() -> None:
    with pytest.raises(ValueError, match="window must be at least 2, got 1"):
        Pool(window=1)
    for axes in [(), (1, 1), (0.5,)]:
        with pytest.raises(ValueError, match="axes must be different integers"):
            Pool(axes=axes)
    with pytest.raises(ValueError, match="neighbours must be at least 2, got 1"):
        Average(neighbours=1)
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 9"):
        Average(bits=9)
    with pytest.raises(ValueError, match=r"pool2 does not store arrays of shape \(4, 8\)"):
        Pool().encode(jnp.ones((4, 8)), 0)
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        average_pool(x, window=0, axes=(1,))
    with pytest.raises(ValueError, match="axes must be those of an array of shape"):
        average_pool(x, window=2, axes=(2,))
    with pytest.raises(ValueError, match="axes must be different"):
        average_pool(x, window=2, axes=(1, -1))
    with pytest.raises(TypeError, match="must be a floating-point array, got dtype int32"):
        average_pool(jnp.ones((4, 8), jnp.int32), window=2, axes=(1,))
    with pytest.raises(ValueError, match=r"pools into \(4, 4\) by windows of 2"):
        repeat_windows(x, shape=(4, 8), window=2, axes=(1,))
