"""Quantisation: unbiased, within its error bounds, small, deterministic, and never contagious."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jact_kernels import (
    dequantize,
    group_ends,
    plan_groups,
    quantize,
    quantized_nbytes,
    rounding_variance,
)

BITS = (1, 2, 4, 7, 8)
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = [(10,), (4,), (3, 130), (2, 64, 3), (2, 35, 1), (2, 2, 3, 5, 7)]


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def round_trip(
    x: jax.Array, bits: int, *, group_size: int = 64, stochastic: bool = True
) -> tuple[jax.Array, np.ndarray]:
    """The decoded array, and the step of each element's group in float64."""
    y, step = _round_trip(x, bits, group_size, stochastic)
    groups = plan_groups(x.shape, group_size)
    assert groups is not None
    steps = np.expand_dims(np.asarray(step, np.float64), groups.axes)
    return y, np.broadcast_to(steps, groups.split_shape).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _round_trip(x: jax.Array, bits: int, group_size: int, stochastic: bool) -> tuple[Any, Any]:
    code = quantize(x, bits=bits, group_size=group_size, stochastic=stochastic)
    y = dequantize(*code, shape=x.shape, dtype=x.dtype, bits=bits, group_size=group_size)
    return y, code[-1]


@functools.partial(jax.jit, static_argnums=(1, 2))
def draws(x: jax.Array, bits: int, count: int) -> jax.Array:
    """Decoded arrays of as many seeds."""

    def one(seed: jax.Array) -> jax.Array:
        code = quantize(x, bits=bits, seed=seed)
        return dequantize(*code, shape=x.shape, dtype=x.dtype, bits=bits)

    return jax.vmap(one)(jnp.arange(count, dtype=jnp.uint32))


variance_of = jax.jit(rounding_variance, static_argnames=("bits", "group_size", "stochastic"))


@pytest.mark.parametrize(("shape", "axis"), [((8, 128), None), ((8, 48, 3), 1), ((5,), None)])
def test_variance_within_known_ends(shape: tuple[int, ...], axis: int | None) -> None:
    x = normal(shape, "bfloat16")
    layout: dict[str, Any] = {"group_size": 16, "axis": axis}
    low, high = group_ends(x, **layout)
    groups = plan_groups(shape, **layout)
    assert groups is not None and low.shape == high.shape == groups.grid_shape
    np.testing.assert_array_equal(low.min(), x.min().astype(jnp.float32))
    np.testing.assert_array_equal(high.max(), x.max().astype(jnp.float32))
    for bits in (2, 8):
        expected = rounding_variance(x, bits=bits, **layout)
        known = rounding_variance(x, bits=bits, **layout, ends=(low, high))
        np.testing.assert_array_equal(known, expected)
        wider = rounding_variance(x, bits=bits, **layout, ends=(low - 4, high + 4))
        assert wider.mean() > expected.mean()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("shape", "dtype"), tuple(zip(SHAPES, DTYPES * 2, strict=True)))
def test_error_bounds(shape: tuple[int, ...], dtype: str, bits: int) -> None:
    x = normal(shape, dtype)
    exact = np.asarray(x, np.float64)
    rounding = np.abs(exact) * float(jnp.finfo(dtype).eps) + 1e-6
    y, step = round_trip(x, bits)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert (np.abs(np.asarray(y, np.float64) - exact) <= step + rounding).all()
    y, step = round_trip(x, bits, stochastic=False)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= step / 2 + rounding).all()
    # The bound is worth something: the steps are not much wider than the range demands.
    assert step.max() <= (exact.max() - exact.min()) / (2**bits - 1) * 1.05 + 1e-6


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple),
    st.integers(1, 8),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-4, 1.0, 300.0]),
    st.sampled_from([0.0, 1.0, -100.0]),
    st.sampled_from([4, 32, 64, 10**6]),
)
def test_error_bounds_of_any_array(
    shape: tuple[int, ...], bits: int, dtype: str, scale: float, offset: float, group_size: int
) -> None:
    if plan_groups(shape, group_size) is None:
        return
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape) * scale + offset, dtype)
    exact = np.asarray(x, np.float64)
    y, step = round_trip(x, bits, group_size=group_size)
    rounding = np.abs(exact) * float(jnp.finfo(dtype).eps) + scale * 1e-6
    assert (np.abs(np.asarray(y, np.float64) - exact) <= step + rounding).all()


@pytest.mark.parametrize("bits", BITS)
def test_unbiased(bits: int) -> None:
    offset = jnp.asarray([0.0, 1000.0, -1000.0, 3.3, -1.7, 0.0, 0.0], jnp.float32)
    spread = jnp.asarray([1.0, 0.1, 0.1, 0.0, 1e-6, 1e-15, 1e15], jnp.float32)
    x = normal((2, 64, 7)) * spread[None, None] + offset[None, None]
    count = 4000
    samples = np.asarray(draws(x, bits, count), np.float64)
    error = samples.mean(0) - np.asarray(x, np.float64)
    deviation = np.sqrt(np.asarray(variance_of(x, bits=bits), np.float64) / count)
    # Each draw is rounded to float32, which the mean of a value near 1000 cannot outdo.
    floor = np.abs(np.asarray(x, np.float64)) * 2.0**-24
    assert (np.abs(error) <= 5.5 * deviation + floor).all()
    for channel in range(x.shape[2]):  # Over a whole group, a common bias would add up.
        total = math.sqrt((deviation[..., channel] ** 2).sum())
        assert abs(error[..., channel].sum()) <= 4.5 * total + floor[..., channel].sum()


@pytest.mark.parametrize("bits", BITS)
def test_variance_is_that_of_the_draws(bits: int) -> None:
    x = normal((2, 64, 7))
    actual = jnp.square(draws(x, bits, 4000) - x[None]).mean()
    assert actual == pytest.approx(float(variance_of(x, bits=bits).mean()), rel=0.02)
    nearest = round_trip(x, bits, stochastic=False)[0]
    expected = variance_of(x, bits=bits, stochastic=False)
    np.testing.assert_allclose(jnp.square(nearest - x), expected, rtol=1e-5, atol=1e-6)


def channels(values: list[float], dtype: str = "float32") -> jax.Array:
    """One group for each value, all of whose elements have that value."""
    return jnp.broadcast_to(jnp.asarray(values, dtype), (1, 64, len(values)))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_constants(dtype: str, bits: int) -> None:
    x = channels([0.0, -0.0, 1.0, -2.5, 1000.0], dtype)  # A bfloat16 holds these.
    assert (round_trip(x, bits)[0] == x).all()
    x = channels([3.3, -1 / 3, 999.9, 1e-3, -65000.0], dtype)
    error = jnp.abs(round_trip(x, bits)[0] - x).astype(jnp.float32)
    bound = jnp.abs(x).astype(jnp.float32) * jnp.float32(2**-7 / (2**bits - 1) * 1.01)
    eps = jnp.float32(float(jnp.finfo(dtype).eps))
    assert (error <= bound + jnp.abs(x).astype(jnp.float32) * eps).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_stays_finite(dtype: str, bits: int) -> None:
    limit = float(jnp.finfo(dtype).max)
    low = np.array([-limit, 0, -limit, limit, -limit])
    high = np.array([limit, limit, 0, limit, -limit])
    ends = np.where((np.arange(64) % 2 == 0)[:, None], low, high)
    x = jnp.asarray(ends[None], dtype)
    y = np.asarray(round_trip(x, bits)[0], np.float64)
    assert np.isfinite(y).all()
    spans = high - low
    if bits == 1 and dtype != "float16":
        # The first range exceeds what a bfloat16 step can span, so it is cut.
        y, x, spans = y[..., 1:], x[..., 1:], spans[1:]
    error = np.abs(y - np.asarray(x, np.float64)).max((0, 1))
    assert (error <= np.maximum(spans / (2**bits - 1) * 1.02, limit * 2**-7)).all()


@pytest.mark.parametrize("bits", BITS)
def test_huge_range_is_decoded_between_its_ends(bits: int) -> None:
    """The product of code and step exceeds float32 here, though no value does."""
    x = jnp.asarray(np.linspace(-3.3e38, 3.3e38, 64).reshape(1, 64, 1), jnp.float32)
    y, step = round_trip(x, bits)
    limit = step if bits > 1 else np.full_like(step, 6.8e38)
    assert (np.abs(np.asarray(y, np.float64) - np.asarray(x, np.float64)) <= limit * 1.001).all()


@pytest.mark.parametrize("bits", BITS)
def test_tiny_and_subnormal(bits: int) -> None:
    scale = np.array([1e-20, 1e-30, 1e-38, 1e-40, 1e-45])
    x = np.asarray(np.linspace(-1, 1, 64)[None, :, None] * scale, np.float32)
    y = np.asarray(round_trip(jnp.asarray(x), bits)[0], np.float64)
    bound = np.maximum(2 * scale / (2**bits - 1) * 1.02, 2.0**-99)
    assert (np.abs(y - x) <= bound).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_group_never_spreads(dtype: str, bits: int) -> None:
    x = normal((2, 128, 3), dtype)
    spoilt, group = np.array(x), np.zeros(x.shape, bool)
    for place, bad in {(1, 70, 2): math.nan, (0, 3, 1): math.inf, (0, 127, 0): -math.inf}.items():
        spoilt[place] = bad
        start = place[1] // 64 * 64
        group[place[0], start : start + 64, place[2]] = True
    y, clean = (np.asarray(round_trip(jnp.asarray(v), bits)[0], np.float32) for v in (spoilt, x))
    assert np.isnan(y[group]).all()
    assert (y[~group] == clean[~group]).all()
    assert (np.isnan(variance_of(jnp.asarray(spoilt), bits=bits)) == group).all()


@pytest.mark.parametrize("shape", [(2, 64, 32), (2, 8, 8, 64), (2, 16, 2, 32, 32), (8, 256)])
def test_no_nan_is_lost(shape: tuple[int, ...]) -> None:
    """XLA's vectorised minimum and maximum on a CPU lose NaN, wherever it is."""
    x = np.asarray(normal(shape))
    places = np.random.default_rng(1).integers(x.size, size=10)
    spoilt = np.repeat(x[None], len(places), axis=0)
    for row, place in zip(spoilt, places, strict=True):
        row.flat[place] = math.nan
    decode = jax.jit(jax.vmap(lambda x: round_trip_in_bits(x, 4)))
    y = np.asarray(decode(jnp.asarray(spoilt))).reshape(len(places), -1)
    assert np.isnan(y[np.arange(len(places)), places]).all()


def round_trip_in_bits(x: jax.Array, bits: int) -> jax.Array:
    return dequantize(*quantize(x, bits=bits), shape=x.shape, dtype=x.dtype, bits=bits)


@pytest.mark.parametrize("shape", [(2, 64, 32), (2, 64, 3), (3, 1000), (2, 4, 8, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_seen_wherever_it_lies(dtype: str, shape: tuple[int, ...]) -> None:
    """XLA's reductions on a CPU overlook some, depending on shape and place."""
    groups = plan_groups(shape)
    assert groups is not None
    for element in (0, 1, groups.size // 2, groups.size - 1):
        # One NaN per group, at the same place in each.
        place = (
            np.arange(groups.size).reshape([groups.split_shape[a] for a in groups.axes]) == element
        )
        place = np.expand_dims(
            place, [a for a in range(len(groups.split_shape)) if a not in groups.axes]
        )
        x = np.where(place, np.nan, np.ones(groups.split_shape)).reshape(shape)
        _, low, step = quantize(jnp.asarray(x, dtype), bits=4)
        assert jnp.isnan(low).all() and jnp.isnan(step).all()


@pytest.mark.parametrize("bits", [1, 4])
def test_jit_eager_vmap_and_scan_agree(bits: int) -> None:
    x = normal((3, 4, 96, 10))
    encode = functools.partial(quantize, bits=bits, seed=3)
    decode = functools.partial(dequantize, shape=x.shape[1:], dtype=x.dtype, bits=bits)
    # One row eagerly, where each operation is compiled by itself, is slow enough.
    eager = [encode(x[0]), *map(jax.jit(encode), x[1:])]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *eager)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, encode(row)), None, x)
    for codes in (jax.jit(jax.vmap(encode))(x), scanned):
        jax.tree.map(np.testing.assert_array_equal, codes, expected)
    values = jnp.stack([decode(*eager[0]), *(jax.jit(decode)(*code) for code in eager[1:])])
    assert (jax.jit(jax.vmap(decode))(*expected) == values).all()


def test_same_seed_same_codes_other_seed_other_codes() -> None:
    x = normal((2, 64, 32))
    codes = functools.partial(jax.jit(quantize, static_argnames="bits"), x, bits=4)
    assert (codes(seed=1)[0] == codes(seed=1)[0]).all()
    assert (codes(seed=1)[0] == codes(seed=jnp.uint32(1))[0]).all()
    changed = (codes(seed=1)[0] != codes(seed=2)[0]).mean()
    assert 0.2 < changed < 0.5  # Two draws differ with probability 2f(1 - f), 1/3 on average.


def test_a_step_of_training_renews_the_noise() -> None:
    """A changed range changes the noise, so errors do not add up over steps."""
    x = normal((2, 64, 256))
    errors = [
        round_trip(x * jnp.float32(scale), 4)[0] / jnp.float32(scale) - x
        for scale in (1.0, 1.01, 1.02)
    ]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        correlation = np.corrcoef(errors[a].ravel(), errors[b].ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(x.size)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(8, 256, 64), (3, 330), (1001,), (5, 35, 3)])
def test_compiled_bytes(shape: tuple[int, ...], bits: int) -> None:
    encode = functools.partial(quantize, bits=bits)
    compiled = jax.jit(encode).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    stored = memory.output_size_in_bytes
    # XLA adds a tuple of pointers.
    pointers = 8 * len(compiled.output_shardings)
    assert 0 <= stored - quantized_nbytes(shape, bits=bits) <= pointers


def test_ratio_to_float32() -> None:
    shape = (16, 512, 768)
    ratios = [4 * math.prod(shape) / quantized_nbytes(shape, bits=bits) for bits in (8, 4, 2, 1)]
    assert ratios == pytest.approx([3.76, 7.11, 12.8, 21.3], rel=0.01)


@pytest.mark.parametrize("bits", BITS)
def test_float64(bits: int) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 3)))
        assert x.dtype == jnp.float64
        y, step = round_trip(x, bits)
        assert y.dtype == jnp.float64
        assert (np.abs(np.asarray(y) - np.asarray(x)) <= step * 1.00001 + 1e-6).all()
        assert variance_of(x, bits=bits).dtype == jnp.float32
        # The same codes whether 64-bit types are on or off.
        narrow = x.astype(jnp.float32)
        codes = jax.jit(quantize, static_argnames="bits")(narrow, bits=bits)
    expected = jax.jit(quantize, static_argnames="bits")(narrow, bits=bits)
    jax.tree.map(np.testing.assert_array_equal, codes, expected)


def test_errors() -> None:
    x = normal((2, 64, 3))
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 9"):
        quantize(x, bits=9)
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'cuda'"):
        quantize(x, bits=4, implementation="cuda")
    with pytest.raises(TypeError, match="dtype must be one of .*float64.*, got int32"):
        quantize(jnp.ones((2, 64, 3), jnp.int32), bits=4)
    for shape in [(), (0, 64, 3), (8, 1, 3)]:
        with pytest.raises(ValueError, match="cannot be divided into groups"):
            quantize(jnp.ones(shape), bits=4)
    code = jax.eval_shape(functools.partial(quantize, bits=4), x)
    with pytest.raises(
        ValueError, match=r"has ranges of shapes \[\(2, 4, 3\), .* at group_size 16"
    ):
        dequantize(*code, shape=x.shape, dtype=x.dtype, bits=4, group_size=16)
