"""Exact sensitivities: the gradient with one residual rounded, next to the gradient without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jact.adapt import layout as layouts
from jact.adapt.table import Layout, Sensitivities
from jact.adapt.taps import Rounding
from jact.codecs import Keep
from jact.engine.instrumented import instrumented_gradient
from jact.engine.trace import Traced, split_arrays


def measure(
    trace: Callable[..., Traced],
    residuals: layouts.Residuals,
    layout: Layout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    draws: int,
    seed: int,
) -> Sensitivities:
    """Rounds one residual at a time, several times, and compares gradients.

    One compiled function serves all residuals and codecs: which is rounded, and with what noise, it
    is told when it runs. It holds one gradient besides the exact one, whose sum over the draws it
    keeps, and reduces the differences on the fly. The mean of the squared differences is the error.
    The squared bias is the mean product of the differences of *different* draws, to which noise
    contributes nothing.

    Args:
        trace: traces the function at arguments.
        residuals: its residuals.
        layout: their table.
        args: the function's arguments.
        kwargs: its keyword arguments.
        draws: how often each residual is rounded; codecs that round the same way every time are
            tried once.
        seed: of the noise.
    """
    arrays, call = split_arrays(args, kwargs)

    def traced_at(arrays: Any) -> Traced:
        return trace(*call(arrays))

    @jax.jit
    def exact_gradient(arrays: Any) -> list[Any]:
        nothing = (jnp.int32(0), jnp.int32(0), jnp.uint32(0))
        return _gradient(traced_at(arrays), residuals, layout, nothing)

    @jax.jit
    def compare(exact: list[Any], residual: Any, codec: Any, seeds: Any, arrays: Any) -> Any:
        traced = traced_at(arrays)

        def draw(carry: Any, seed: Any) -> tuple[Any, None]:
            total, sums = carry
            rounded = _gradient(traced, residuals, layout, (residual, codec, seed))
            change = [a - b for a, b in zip(rounded, exact, strict=True)]
            new = [_dot(change, change), _dot(rounded, exact), _dot(rounded, rounded)]
            cosine = new[1] / jnp.sqrt(jnp.maximum(new[2] * _dot(exact, exact), 1e-38))
            sums = sums + jnp.stack([new[0], cosine])
            return ([a + b for a, b in zip(total, change, strict=True)], sums), None

        zeros = ([jnp.zeros_like(e) for e in exact], jnp.zeros(2, jnp.float32))
        (total, sums), _ = lax.scan(draw, zeros, seeds)
        return sums[0], _dot(total, total), sums[1]

    exact = exact_gradient(arrays)
    shape = layout.supported.shape
    error, bias = np.where(layout.supported, 0.0, np.inf), np.zeros(shape)
    cosine = np.where(layout.supported, 1.0, 0.0)
    seeds = jnp.arange(draws, dtype=jnp.uint32) + jnp.uint32(seed * 2**16)
    for i, j in zip(*np.nonzero(layout.supported), strict=True):
        if isinstance(layout.codecs[j], Keep):
            continue
        squares, square_of_sum, cosines = map(
            float, compare(exact, jnp.int32(i), jnp.int32(j), seeds, arrays)
        )
        error[i, j] = squares / draws
        cosine[i, j] = cosines / draws
        # A single draw cannot tell.
        if draws > 1:
            products = (square_of_sum - squares) / (draws * (draws - 1))
            bias[i, j] = min(max(products, 0.0), error[i, j])
    gradient = float(jax.jit(_dot)(exact, exact))
    return Sensitivities(
        layout.names,
        layout.codecs,
        error,
        bias,
        layout.nbytes,
        layout.raw_bytes,
        gradient,
        layout.basis,
        cosine,
        layout.operations,
    )


def at(
    key: Any, traced: Traced, residuals: layouts.Residuals, layout: Layout
) -> tuple[list[Any], dict[str, Any]]:
    """Likewise at the values of a traced function, from two draws each; itself traceable.

    Args:
        key: a typed key, of the noise.
        traced: the function; its first result is a scalar.
        residuals: its residuals.
        layout: their table.

    Returns:
        The gradient, flat, and the statistics that `Sensitivities.from_statistics` takes.
    """
    exact = _gradient(traced, residuals, layout, (jnp.int32(0), jnp.int32(0), jnp.uint32(0)))
    coded = [j for j, codec in enumerate(layout.codecs) if not isinstance(codec, Keep)]
    pairs = [(i, j) for i, j in zip(*np.nonzero(layout.supported), strict=True) if j in coded]
    error = jnp.zeros(layout.supported.shape, jnp.float32)
    statistics = {"error": error, "bias": error, "gradient": _dot(exact, exact)}
    if not pairs:
        return exact, statistics
    seeds = jax.random.bits(key, (len(pairs), 2), jnp.uint32)

    def compare(_: None, at: Any) -> tuple[None, Any]:
        residual, codec, seeds = at
        changes = []
        for seed in seeds:
            rounded = _gradient(traced, residuals, layout, (residual, codec, seed))
            changes.append([a - b for a, b in zip(rounded, exact, strict=True)])
        a, b = changes
        return None, ((_dot(a, a) + _dot(b, b)) / 2, jnp.maximum(_dot(a, b), 0))

    rows, columns = (jnp.array(x, jnp.int32) for x in zip(*pairs, strict=True))
    _, (errors, biases) = lax.scan(compare, None, (rows, columns, seeds))
    statistics["error"] = error.at[rows, columns].set(errors)
    statistics["bias"] = error.at[rows, columns].set(biases)
    return exact, statistics


def _gradient(
    traced: Traced, residuals: layouts.Residuals, layout: Layout, operands: Any
) -> list[Any]:
    """The gradient with one residual stored by one codec, as a flat list."""
    plan = residuals.stored_with(Keep())
    return instrumented_gradient(traced, plan, Rounding(layout), operands, traced.values)[0]


def _dot(a: list[Any], b: list[Any]) -> Any:
    """The real inner product of two gradients, float32."""
    products = (jnp.real(jnp.conj(x) * y).astype(jnp.float32) for x, y in zip(a, b, strict=True))
    return functools.reduce(jnp.add, map(jnp.sum, products), jnp.float32(0))
