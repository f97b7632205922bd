"""Ranges: groups along any axis, an edge at zero, and ranges in 48, 32, 24 and 16 bits."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jact_kernels import dequantize, plan_groups, quantize, quantized_nbytes, rounding_variance
from jact_kernels.quantize.ranges import Scheme, measure

BITS = (1, 2, 4, 7, 8)
#: How codes are packed is tested elsewhere; their ranges are the same.
SLOW = (2, 8)
# Every other one with either way to store ranges.
EDGED = [
    {
        "bits": bits,
        "zero_edge": True,
        "stochastic": stochastic,
        "ranges": "uint8" if stochastic == (bits in (2, 8)) else "bfloat16",
    }
    for bits in BITS
    for stochastic in (True, False)
]
STORED = [{"bits": bits, "ranges": ranges} for bits in BITS for ranges in ("float32", "uint8")]


def some(options: list[dict[str, Any]]) -> list[Any]:
    """The options as parameters of a test."""
    return [
        pytest.param(o, marks=[pytest.mark.slow] * (o["bits"] in SLOW), id=label(o))
        for o in options
    ]


def label(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def groups_of_every_kind() -> jax.Array:
    """Channels with both signs, one sign, zeros among them, zeros alone, and at any scale."""
    x = normal((2, 512, 10))
    x[..., 1] = np.abs(x[..., 1])
    x[..., 2] = -np.abs(x[..., 2])
    x[..., 3] = np.maximum(x[..., 3], 0)
    x[..., 4] = np.minimum(x[..., 4], 0)
    x[..., 5] = 0
    x[..., 6] = np.where(x[..., 6] > 2, x[..., 6], -0.01 * np.abs(x[..., 6]))
    x[..., 7] *= 1e30
    x[..., 8] *= 1e-25
    x[:, ::7, 9] = 0
    return jnp.asarray(x)


def coded(x: jax.Array, seed: Any = 0, *, stochastic: bool = True, **options: Any) -> jax.Array:
    code = quantize(x, seed=seed, stochastic=stochastic, **options)
    return dequantize(*code, shape=x.shape, dtype=x.dtype, **options)


def decoded(x: jax.Array, **options: Any) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(coded, **options))(x), np.float64)


def draws(x: jax.Array, count: int, **options: Any) -> np.ndarray:
    seeds = jnp.arange(count, dtype=jnp.uint32)
    one = functools.partial(coded, x, **options)
    return np.asarray(jax.jit(jax.vmap(one))(seeds), np.float64)


def steps(x: jax.Array, *, stochastic: bool = True, zero_edge: bool = False, **options: Any) -> Any:
    """The step of each element's group."""
    groups = plan_groups(x.shape)
    assert groups is not None
    scheme = Scheme(
        groups=groups,
        bits=options["bits"],
        stochastic=stochastic,
        zero_edge=zero_edge,
        storage=options["ranges"],
    )
    split = x.reshape(groups.split_shape)
    ends = (reduce(split, axis=groups.axes) for reduce in (jnp.min, jnp.max))
    _, (_, step, _) = measure(*ends, scheme)
    return np.broadcast_to(np.expand_dims(step, groups.axes), groups.split_shape).reshape(x.shape)


@pytest.mark.parametrize("options", some(EDGED))
def test_signs_survive(options: dict[str, Any]) -> None:
    x = groups_of_every_kind()
    y = decoded(x, **options)
    exact = np.asarray(x)
    assert (y[exact > 0] > 0).all() and (y[exact < 0] < 0).all()
    # Zero is negative among both signs, and itself among one.
    zeros = exact == 0
    assert (y[zeros] <= 0).all()
    assert (y[..., :9][zeros[..., :9]] == 0).all()
    assert (y[..., 9][zeros[..., 9]] < 0).all()


@pytest.mark.parametrize("options", some(EDGED))
def test_error_bound_with_an_edge_at_zero(options: dict[str, Any]) -> None:
    x = groups_of_every_kind()
    error = np.abs(decoded(x, **options) - np.asarray(x, np.float64))
    bound = steps(x, **options) * 1.00001
    if not options["stochastic"] or options["bits"] == 1:
        # Half a step, except where zeros have a code of their own, which others must not take.
        assert (error <= np.where(np.abs(x) < bound / 2, bound, bound / 2))[..., [0, 6, 7]].all()
    assert (error <= bound).all()
    span = np.ptp(np.asarray(x, np.float64), axis=1).max(0)
    assert (bound.max((0, 1)) <= span * 1.1 / max(2 ** options["bits"] - 2, 1) + 1e-29)[:5].all()


@pytest.mark.parametrize("options", some([o for o in EDGED if o["stochastic"]]))
def test_unbiased_away_from_zero(options: dict[str, Any]) -> None:
    x = groups_of_every_kind()[..., :7]
    count = 500
    samples = draws(x, count, **options)
    exact = np.asarray(x, np.float64)
    bias = np.abs(samples.mean(0) - exact)
    expected = np.asarray(jax.jit(functools.partial(rounding_variance, **options))(x), np.float64)
    step = steps(x, **options)
    away = np.abs(exact) >= step
    if options["bits"] > 1:
        # The last term is for the rare draws of elements next to a code.
        assert (bias <= 5.5 * np.sqrt(expected / count) + 15 * step / count + 1e-6)[away].all()
    assert away.any() or options["bits"] == 1
    # What is near zero is biased, and the error model says by how much.
    assert (bias <= step * 1.00001).all()
    actual = np.square(samples - exact).mean(0)
    assert actual.mean() == pytest.approx(expected.mean(), rel=0.03)
    near = ~away & (exact != 0)
    assert actual[near].mean() == pytest.approx(expected[near].mean(), rel=0.03)


@pytest.mark.parametrize("options", some([o for o in EDGED if not o["stochastic"]]))
def test_error_model_of_the_nearest(options: dict[str, Any]) -> None:
    x = groups_of_every_kind()[..., :7]
    error = np.square(decoded(x, **options) - np.asarray(x, np.float64))
    expected = jax.jit(functools.partial(rounding_variance, **options))(x)
    np.testing.assert_allclose(expected, error, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("options", some(STORED))
def test_unbiased_however_ranges_are_stored(options: dict[str, Any]) -> None:
    offset = jnp.asarray([0.0, 1000.0, -1000.0, 3.3, 0.0, 0.0], jnp.float32)
    spread = jnp.asarray([1.0, 0.1, 0.1, 0.0, 1e-15, 1e15], jnp.float32)
    # Ranges that are stored relative to each other differ by a factor of 50.
    scale = jnp.asarray(np.repeat(np.geomspace(1, 50, 8), 64), jnp.float32)
    x = jnp.asarray(normal((2, 512, 6))) * spread[None, None] * scale[None, :, None]
    x = x + offset[None, None]
    count = 500
    samples = draws(x, count, **options)
    exact = np.asarray(x, np.float64)
    expected = jax.jit(functools.partial(rounding_variance, **options))(x)
    deviation = np.sqrt(np.asarray(expected, np.float64) / count)
    step, floor = steps(x, **options), np.abs(exact) * 2.0**-24
    # The term of the step is for the rare draws of elements next to a code.
    bound = 5.5 * deviation + 15 * step / count + floor
    assert (np.abs(samples.mean(0) - exact) <= bound).all()
    assert (np.abs(samples - exact) <= step * 1.00001 + floor * 2).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("ranges", ["float32", "uint8"])
def test_narrow_groups_far_from_zero(ranges: str, bits: int) -> None:
    x = jnp.asarray(1000 + 0.1 * np.clip(normal((2, 512, 3)), -2, 2), jnp.float32)
    coarse = np.sqrt(np.mean(np.square(decoded(x, bits=bits) - np.asarray(x))))
    fine = np.sqrt(np.mean(np.square(decoded(x, bits=bits, ranges=ranges) - np.asarray(x))))
    assert fine < coarse / 4
    assert fine < 0.4 / (2**bits - 1)


@pytest.mark.parametrize("options", [*EDGED[2:6], *STORED[::3]], ids=label)
def test_bad_groups_keep_to_themselves(options: dict[str, Any]) -> None:
    x = normal((2, 512, 3))
    spoilt, group = x.copy(), np.zeros(x.shape, bool)
    for place, bad in {(1, 70, 2): math.nan, (0, 3, 1): math.inf, (0, 127, 0): -math.inf}.items():
        spoilt[place] = bad
        start = place[1] // 64 * 64
        group[place[0], start : start + 64, place[2]] = True
    y = decoded(jnp.asarray(spoilt), **options)
    assert np.isnan(y[group]).all() and np.isfinite(y[~group]).all()
    bound = steps(jnp.asarray(spoilt), **options)
    assert (np.abs(y - spoilt) <= bound * 1.00001)[~group].all()
    # Another entry of the batch, or another channel, does not even change its codes.
    untouched = ~group.any(1, keepdims=True).repeat(512, axis=1)
    assert (y[untouched] == decoded(jnp.asarray(x), **options)[untouched]).all()
    variance = jax.jit(functools.partial(rounding_variance, **options))(jnp.asarray(spoilt))
    assert (np.isnan(np.asarray(variance)) == group).all()
    everything_bad = decoded(jnp.full((2, 512, 3), jnp.nan), **options)
    assert np.isnan(everything_bad).all()


@pytest.mark.parametrize("options", some([*EDGED, *STORED]))
def test_finite_stays_finite(options: dict[str, Any]) -> None:
    limit = float(np.finfo(np.float32).max)
    low = np.array([-limit, 0, -limit, limit, -limit, 1e-45, -1e-42, 1e38])
    high = np.array([limit, limit, 0, limit, -limit, 1e-40, 1e-42, 3e38])
    ends = np.where((np.arange(512) % 2 == 0)[:, None], low, high)
    x = jnp.asarray(ends[None], jnp.float32)
    y = decoded(x, **options)
    assert np.isfinite(y).all()
    assert (np.abs(y[..., 5:7]) <= 2.0**-99 * 2**8).all()


@pytest.mark.parametrize("shape", [(8, 512, 24), (3, 330), (4, 33, 31, 5), (4096,), (64, 7, 7, 64)])
@pytest.mark.parametrize("options", [EDGED[0], EDGED[2], EDGED[7], *STORED[4:6]], ids=label)
def test_compiled_bytes(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    encode = functools.partial(quantize, **options)
    compiled = jax.jit(encode).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    sizes = {name: value for name, value in options.items() if name != "stochastic"}
    assert 0 <= memory.output_size_in_bytes - quantized_nbytes(shape, **sizes) <= 6 * 8


def test_bits_per_group() -> None:
    shape = (8, 2048, 16)
    groups = math.prod(shape) // 64

    def bits(**options: Any) -> float:
        return (quantized_nbytes(shape, bits=4, **options) - math.prod(shape) / 2) * 8 / groups

    assert bits() == 32 and bits(ranges="float32") == 48 and bits(zero_edge=True) == 24
    assert bits(ranges="uint8") == 16 + 64 / 32
    # Where there are too few ranges to store them relative to each other, they take 16 bits each.
    few = (128, 64)
    assert quantized_nbytes(few, bits=4, ranges="uint8") == quantized_nbytes(few, bits=4)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_groups_along_an_axis(axis: int) -> None:
    x = jnp.asarray(normal((32, 48, 128)))
    groups = plan_groups(x.shape, 16, axis)
    assert groups is not None
    assert (groups.axis, groups.last, groups.size) == (axis % 3, axis % 3, 16)
    # Scaled differently along that axis, groups have their own range.
    scale = np.repeat(10.0 ** np.arange(x.shape[axis] // 16), 16)
    scale = np.expand_dims(scale, [a for a in range(3) if a != axis % 3])
    x = x * jnp.asarray(scale, jnp.float32)
    options = {"bits": 4, "group_size": 16, "axis": axis}
    y = decoded(x, **options)
    assert (np.abs(y - np.asarray(x)) <= 5 * scale * 2 / 15).all()
    with pytest.raises(ValueError, match="at group_size 16 along axis 3"):
        quantize(x, bits=4, group_size=16, axis=3)
    assert plan_groups((8, 3, 64), 64, 1) is None and plan_groups((), 64, 0) is None


@pytest.mark.parametrize("options", [EDGED[2], STORED[5]], ids=label)
def test_jit_eager_and_vmap_agree(options: dict[str, Any]) -> None:
    x = jnp.asarray(normal((3, 4, 512, 6)))
    encode = functools.partial(quantize, seed=3, **options)
    expected = jax.tree.map(lambda *a: jnp.stack(a), *[jax.jit(encode)(row) for row in x])
    jax.tree.map(np.testing.assert_array_equal, jax.jit(jax.vmap(encode))(x), expected)
    with jax.disable_jit():
        eager = encode(x[0])
    jax.tree.map(np.testing.assert_array_equal, eager, jax.tree.map(lambda a: a[0], expected))


def test_errors() -> None:
    x = jnp.ones((2, 64, 3))
    with pytest.raises(ValueError, match="ranges must be one of .*, got 'int8'"):
        quantize(x, bits=4, ranges="int8")
    with pytest.raises(ValueError, match="with zero_edge a low end needs no 32 bits"):
        quantize(x, bits=4, ranges="float32", zero_edge=True)
