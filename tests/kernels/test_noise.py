"""Noise: uniform, and independent from element to element, seed to seed and range to range."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jact_kernels import noise

SHAPE = (32, 64, 128)
SIZE = math.prod(SHAPE)
SEEDS = (0, 1, 2, 1000, 2**31)
LIMIT = 5.0  # Standard deviations. Weaker hashes (a round less) miss it by tens and hundreds.


def centred(seed: noise.Seed, group_bits: int | None = None) -> np.ndarray:
    bits = None if group_bits is None else jnp.full((1, 1, 1), group_bits, jnp.uint32)
    return np.asarray(noise.uniform(SHAPE, seed, bits), np.float64) - 0.5


def chi_square(*samples: np.ndarray, bins: int) -> float:
    """How far from uniform the joint histogram of the samples is, in standard deviations."""
    edges = [np.linspace(-0.5, 0.5, bins + 1)] * len(samples)
    counts, _ = np.histogramdd([sample.ravel() for sample in samples], edges)
    expected = samples[0].size / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two samples, in standard deviations."""
    return float((a * b).mean() * 12 * math.sqrt(a.size))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform(seed: int) -> None:
    u = centred(seed)
    assert u.min() >= -0.5 and u.max() < 0.5
    assert abs(u.mean()) < LIMIT / math.sqrt(12 * SIZE)
    assert chi_square(u, bins=1024) < LIMIT
    # The lower bits are random as well: the fractional part of a multiple is uniform.
    assert chi_square(np.mod((u + 0.5) * 2**12, 1) - 0.5, bins=1024) < LIMIT


@pytest.mark.parametrize("axis", range(len(SHAPE)))
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16])
def test_neighbours_are_independent(axis: int, lag: int) -> None:
    for seed in SEEDS:
        u = np.moveaxis(centred(seed), axis, 0)
        assert abs(correlation(u[lag:], u[:-lag])) < LIMIT
        assert chi_square(u[lag:], u[:-lag], bins=32) < LIMIT


def test_no_period() -> None:
    spectrum = np.abs(np.fft.rfft(centred(3).ravel())) ** 2 * 12 / SIZE
    # The greatest of n exponential variables exceeds log(n) + 7 once in a thousand times.
    assert spectrum[1:].max() < math.log(spectrum.size) + 7


def test_seeds_are_independent() -> None:
    for a, b in itertools.combinations([centred(seed) for seed in SEEDS], 2):
        assert abs(correlation(a, b)) < LIMIT
        assert chi_square(a, b, bins=32) < LIMIT


@pytest.mark.parametrize("change", [1, 2, 0x80, 0x10000, 0x20000, 0x800000])
def test_ranges_are_independent(change: int) -> None:
    a, b = centred(5, 0x3F803F80), centred(5, 0x3F803F80 + change)
    assert abs(correlation(a, b)) < LIMIT
    assert chi_square(a, b, bins=32) < LIMIT


def test_each_group_has_its_own_noise() -> None:
    bits = jnp.arange(8, dtype=jnp.uint32).reshape(8, 1)
    whole = noise.random_bits((8, 16), 3, bits)
    for row in range(8):
        alone = noise.random_bits((8, 16), 3, jnp.full((8, 1), row, jnp.uint32))
        assert (whole[row] == alone[row]).all()


def test_python_and_traced_seeds_agree() -> None:
    expected = noise.random_bits((4, 5), 7)
    traced = jax.jit(lambda seed: noise.random_bits((4, 5), seed))
    assert (traced(jnp.uint32(7)) == expected).all()
    assert (traced(jnp.int32(7)) == expected).all()
    assert (noise.random_bits((4, 5), 7 + 2**32) == expected).all()
    assert (noise.random_bits((4, 5), -1) == noise.random_bits((4, 5), 2**32 - 1)).all()
    many = jax.vmap(lambda seed: noise.random_bits((4, 5), seed))(jnp.arange(8, dtype=jnp.uint32))
    assert (many[7] == expected).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4, 5, 6)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert noise.uniform(shape, 1).shape == shape
    assert noise.uniform(shape, 1).dtype == jnp.float32
