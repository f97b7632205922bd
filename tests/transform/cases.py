"""The small functions and models that transformations are tested on, and how to compare results.

To have every transformation test a function, add a line to `FUNCTIONS` or `MODELS`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jact
from benchmarks import models

ROWS, WIDTH = 256, 64


def normal(index: int, *shape: int, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
    """Normally distributed numbers, different for each index."""
    return (jax.random.normal(jax.random.key(index), shape) * scale).astype(dtype)


#: Activations of 64 KiB: large enough for every policy to compress.
X = normal(0, ROWS, WIDTH)
W = normal(1, WIDTH, WIDTH, scale=0.1)
V = normal(2, WIDTH, WIDTH, scale=0.1)
PARAMS = (W, V)


def net(params: Any, x: jax.Array) -> jax.Array:
    """Two dense layers with a smooth and a kinked activation function."""
    h = jax.nn.relu(jax.nn.gelu(x @ params[0]) @ params[1])
    return jnp.sum(jnp.tanh(h) * h) / ROWS


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w)


def normalised(params: Any, x: jax.Array) -> jax.Array:
    h = x @ params[0]
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return -jnp.mean(jax.nn.log_softmax(jax.nn.relu(h) @ params[1])[:, 3])


def attention(params: Any, x: jax.Array) -> jax.Array:
    heads = x.reshape(4, 64, 4, 16)
    q, k = ((x @ p).reshape(heads.shape) for p in params)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", scores, heads @ jnp.ones((16, 16))) ** 2)


def convolution(kernels: Any, images: jax.Array) -> jax.Array:
    for kernel in kernels:
        images = lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        images = jax.nn.relu(images)
    pooled = lax.reduce_window(images, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(pooled**2) / len(images)


def dropout(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    h = jnp.where(mask, jax.nn.relu(x @ params[0]) / 0.5, 0.0)
    return jnp.sum(jnp.tanh(h @ params[1])) / ROWS


def gathered(params: Any, x: jax.Array, index: jax.Array, chosen: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params[0])[index]
    return jnp.sum(jnp.where(chosen, h @ params[1], 0.0) ** 2) / ROWS


def shared(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2) / ROWS


def mixed_precision(params: Any, x: jax.Array) -> jax.Array:
    half = jnp.bfloat16
    h = jax.nn.gelu(x.astype(half) @ params[0].astype(half)) @ params[1].astype(half)
    return jnp.sum(h.astype(jnp.float32) ** 2) / ROWS


def net_in_float32(params: Any, x: jax.Array) -> jax.Array:
    """What `half_net` computes in less."""
    return jnp.sum((jax.nn.gelu(x @ params[0]) @ params[1]) ** 2) / ROWS


def half_net(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum((jax.nn.gelu(x @ params[0]) @ params[1]).astype(jnp.float32) ** 2) / ROWS


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that returns a scalar, and arguments of which the first is differentiated.

    Attributes:
        fun: the function.
        make: returns the arguments.
        tolerance: relative error allowed to the gradient at 8 bits.
        has_aux: whether the function returns auxiliary data, too.
    """

    fun: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    tolerance: float = 0.01
    has_aux: bool = False


def _kernels() -> tuple[Any, ...]:
    kernels = [normal(3, 3, 3, 4, 8, scale=0.2), normal(4, 3, 3, 8, 8, scale=0.2)]
    return kernels, normal(5, 4, 16, 16, 4)


def _indices() -> tuple[Any, ...]:
    index = jnp.arange(ROWS) * 7 % ROWS
    return PARAMS, X, index, (jnp.arange(ROWS * WIDTH) % 3 == 0).reshape(ROWS, WIDTH)


def _half(dtype: Any) -> tuple[Any, ...]:
    return jax.tree.map(lambda a: a.astype(dtype), (PARAMS, X))


FUNCTIONS = {
    "net": Case(net, lambda: (PARAMS, X)),
    "normalised": Case(normalised, lambda: (PARAMS, X)),
    "attention": Case(attention, lambda: (PARAMS, X), 0.03),
    "convolution": Case(convolution, _kernels),
    "dropout": Case(dropout, lambda: (PARAMS, X, jax.random.key(7))),
    "dropout_old_key": Case(dropout, lambda: (PARAMS, X, jax.random.PRNGKey(7))),
    "gathered": Case(gathered, _indices),
    "shared": Case(shared, lambda: (W, X)),
    "mixed_precision": Case(mixed_precision, lambda: (PARAMS, X), 0.02),
    "float16": Case(half_net, lambda: _half(jnp.float16), 0.02),
}


#: Sizes at which the shared models take seconds.
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 64, "layers": 2},
    "convnet_small": {"batch": 4, "layers": 1},
    "transformer_small": {"batch": 1, "layers": 1},
    "gcn": {"batch": 200, "layers": 2},
}


@functools.cache
def task(name: str, dtype: str = "f32") -> models.Task:
    """A model of the shared table at its tiny size."""
    return models.MODELS[name].task(**SIZES[name], dtype=dtype)


def _model(name: str, dtype: str = "f32", tolerance: float = 0.01) -> Case:
    def loss(*args: Any) -> Any:
        return task(name, dtype).loss(*args)

    return Case(loss, lambda: task(name, dtype).arguments(), tolerance, has_aux=True)


MODELS = {name: _model(name, tolerance=0.02) for name in SIZES} | {
    "transformer_small_bf16": _model("transformer_small", "bf16", 0.03),
}


def parametrize(*tables: dict[str, Case]) -> Any:
    """Runs a test for each case of some tables, as its argument `case`."""
    params = []
    for name, case in (pair for table in tables for pair in table.items()):
        marks = [pytest.mark.standard_promotion] if name.endswith("_bf16") else []
        params.append(pytest.param(case, id=name, marks=marks))
    return pytest.mark.parametrize("case", params)


def relative_error(got: Any, want: Any) -> float:
    """The norm of the difference, relative to that of `want`, or absolute where that is zero."""
    error = norm = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if b.dtype == jax.dtypes.float0 or jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            continue
        wide = np.complex128 if jnp.iscomplexobj(b) else np.float64
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        error += float(np.sum(np.abs(a - b) ** 2))
        norm += float(np.sum(np.abs(b) ** 2))
    return (error / (norm or 1.0)) ** 0.5


def assert_same_types(got: Any, want: Any) -> None:
    """Structure, shapes, dtypes and weak types agree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not hasattr(b, "dtype") or b.dtype == jax.dtypes.float0:
            assert type(a) is type(b)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
            continue
        a, b = jax.typeof(a), jax.typeof(b)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def assert_equal(got: Any, want: Any) -> None:
    """Trees of the same types agree bit for bit."""
    assert_same_types(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if hasattr(b, "dtype") and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Trees of the same types agree to a relative error."""
    assert_same_types(got, want)
    error = relative_error(got, want)
    assert error <= tolerance, f"relative error {error:.3g} exceeds {tolerance}"


def assert_gradients_close(loss: Any, args: tuple[Any, ...], **errors: float) -> None:
    """Under each codec the gradient errs by no more than is given; arrays of any size are codes."""
    want = jax.jit(jax.grad(loss))(*args)
    for codec, error in errors.items():
        policy = jact.Policy(default=codec, min_bytes=0)
        assert_close(jax.jit(jact.grad(loss, policy=policy))(*args), want, error)


def assert_matches(got: Any, want: Any, tolerance: float, exact: bool = True) -> None:
    """The values of pairs (value, gradient) agree, bit for bit if `exact`; gradients are close."""
    if exact:
        assert_equal(got[0], want[0])
    else:
        assert_close(got[0], want[0], 1e-6)
    assert_close(got[1], want[1], tolerance)
