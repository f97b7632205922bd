"""Averages over windows: all ways to form them agree, whichever platform each is for."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact_kernels
from jact_kernels import average_pool, repeat_windows
from jact_kernels.pool import pallas_tpu, reference

DTYPES = ("float16", "bfloat16", "float32")

CASES: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
    ((6,), (0,), 4),
    ((2, 9), (-1,), 2),
    ((3, 10, 5), (1,), 3),
    ((2, 6, 8, 3), (1, 2), 2),
    ((2, 7, 5, 3), (1, 2), 4),
    ((2, 3, 5, 7), (2, 3), 3),
    ((2, 4, 5, 6, 3), (1, 2, 3), 2),
    ((2, 3, 2), (1,), 5),
    ((2, 3, 2), (0, 1, 2), 1),
]


def hostile(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, and one each of what is awkward, as far as there is room."""
    limits = jnp.finfo(dtype)
    x = np.random.default_rng(sum(shape)).normal(size=math.prod(shape))
    odd = [-0.0, limits.max, -limits.max, math.inf, -math.inf, math.nan, limits.smallest_normal]
    count = min(len(odd), x.size // 4)
    x[:: max(x.size // max(count, 1), 1)][:count] = [float(n) for n in odd[:count]]
    return jnp.asarray(x.reshape(shape), dtype)


def assert_same(a: Any, b: Any) -> None:
    """Asserts the same dtype and values; any NaN equals any other."""
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axes", "window"), CASES)
def test_what_a_tpu_runs_repeats_the_same(
    shape: tuple[int, ...], axes: tuple[int, ...], window: int, dtype: str
) -> None:
    axes = tuple(axis % len(shape) for axis in axes)
    pooled = hostile(reference.pooled_shape(shape, window, axes), dtype)
    static = {"shape": shape, "window": window, "axes": axes}
    expected = reference.broadcast_windows(pooled, **static)
    assert_same(repeat_windows(pooled, **static), expected)
    assert_same(reference.spread_windows(pooled, **static), expected)


@pytest.mark.parametrize(("shape", "axes", "window"), CASES)
def test_what_a_tpu_runs_adds_up_the_same(
    shape: tuple[int, ...], axes: tuple[int, ...], window: int
) -> None:
    """Up to the rounding of as many additions; exactly where no sum is rounded."""
    axes = tuple(axis % len(shape) for axis in axes)
    sums = [
        functools.partial(form, window=window, axes=axes)
        for form in (reference.sum_windows, reference.sum_slices)
    ]
    whole = jnp.asarray(np.random.default_rng(0).integers(-99, 99, size=shape), jnp.float32)
    assert_same(*(form(whole) for form in sums))
    # Scaled down as `average_pool` does, so that finite numbers have a finite sum.
    count = window ** len(axes)
    x = hostile(shape, "float32") * jnp.float32(1 / count)
    ours, theirs = (np.asarray(form(x), np.float64) for form in sums)
    finite = np.isfinite(theirs)
    assert_same(np.where(finite, 0, ours), np.where(finite, 0, theirs))
    sizes = np.asarray(sums[1](jnp.where(jnp.isfinite(x), jnp.abs(x), 0)), np.float64)
    difference = np.abs(np.where(finite, ours, 0) - np.where(finite, theirs, 0))
    assert (difference <= sizes * 2 * (count - 1) * 2.0**-24).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "window"),
    [((2, 64, 256), 2), ((3, 256, 130), 4), ((192, 128), 3), ((2, 3, 128, 200), 2)],
)
def test_kernel_conforms(shape: tuple[int, ...], window: int, dtype: str) -> None:
    x = hostile(shape, dtype)
    axes = (len(shape) - 2,)
    for out in ("bfloat16", "float32"):
        static: dict[str, Any] = {"window": window, "axes": axes, "dtype": jnp.dtype(out)}
        assert pallas_tpu.unsupported(shape, (dtype, out), window, axes) is None
        assert_same(
            pallas_tpu.average_pool(x, **static, interpret=True),
            reference.average_pool(x, **static),
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "axes", "window", "why"),
    [
        ((2, 64, 128), "float16", (1,), 2, "float16 is left to XLA"),
        ((2, 64, 64, 128), "float32", (1, 2), 2, "other axes than the last but one"),
        ((2, 64, 100), "float32", (1,), 2, "fewer than 128 channels"),
        ((2, 66, 128), "float32", (1,), 2, "64 does not divide 66"),
        ((0, 64, 128), "float32", (1,), 2, "nothing to do"),
        ((1, 2**13, 128), "float32", (1,), 2**8, "too large for a block"),
    ],
)
def test_what_the_kernel_leaves(
    shape: tuple[int, ...], dtype: str, axes: tuple[int, ...], window: int, why: str
) -> None:
    reason = pallas_tpu.unsupported(shape, (dtype, dtype), window, axes)
    assert reason is not None and why in reason
    pool = functools.partial(average_pool, window=window, axes=axes, implementation="pallas")
    text = (
        jax.jit(pool).trace(jax.ShapeDtypeStruct(shape, dtype)).lower(lowering_platforms=("tpu",))
    )
    assert "tpu_custom_call" not in text.as_text()


def test_selection() -> None:
    x = jax.ShapeDtypeStruct((2, 64, 128), jnp.float32)
    pool = functools.partial(average_pool, window=2, axes=(1,))
    for name, taken in (("pallas", True), ("auto", False)):
        traced = jax.jit(functools.partial(pool, implementation=name)).trace(x)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert ("tpu_custom_call" in text) == taken
    rows = jact_kernels.explain((2, 64, 128), implementation="pallas").rows
    reasons = {(row.operation, row.platform): row for row in rows}
    assert reasons["average_pool", "tpu"].implementation == "pallas"
    for case in (("repeat_windows", "tpu"), ("average_pool", "cuda"), ("pack_mask", "tpu")):
        assert reasons[case].implementation == "xla"
        assert "no pallas kernel is written for it" in reasons[case].reason
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'mosaic'"):
        average_pool(jnp.ones((2, 64, 128)), window=2, axes=(1,), implementation="mosaic")


def test_each_platform_has_its_own_way() -> None:
    x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    traced = jax.jit(functools.partial(average_pool, window=2, axes=(1, 2))).trace(x)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cuda")}
    assert "reduce_window" in texts["tpu"] and "reduce_window" not in texts["cuda"]


@pytest.mark.parametrize("window", [2, 4])
def test_nothing_is_copied(window: int) -> None:
    x = jax.ShapeDtypeStruct((8, 32, 32, 16), jnp.float32)
    pool = functools.partial(average_pool, window=window, axes=(1, 2))
    memory = jax.jit(pool).lower(x).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= x.size * x.dtype.itemsize / window


def test_transformations() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 6, 2)), jnp.float32)
    pool = functools.partial(average_pool, window=2, axes=(1,), implementation="pallas")
    rows = jnp.stack([pool(row) for row in x])
    assert_same(jax.jit(jax.vmap(pool))(x), rows)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, pool(row)), None, x)
    assert_same(scanned, rows)
    gradient = jax.grad(lambda x: jnp.sum(average_pool(x, window=2, axes=(1,))))(x[0])
    assert_same(gradient, jnp.full(x[0].shape, 0.5))
    repeat = functools.partial(repeat_windows, shape=(4, 6, 2), window=2, axes=(1,))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(repeat(x))))(rows[0])
    assert_same(gradient, jnp.full(rows[0].shape, 2.0))
