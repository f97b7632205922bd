"""Loops whose bodies are compressed: names, plans and reports of what they stack up."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact
from tests.transform import cases

LAYERS, ROWS, WIDTH = 3, 64, 64
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
W = jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w)


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda h, u: (layer(u, h), None), x, w)[0] ** 2)


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    def twice(h: jax.Array, u: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.fori_loop(0, 2, lambda i, g: layer(u, g), h), None

    return jnp.sum(jax.lax.scan(twice, x, w)[0] ** 2)


def two_loops(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = jax.lax.scan(lambda h, u: (layer(u, h), None), x, w)[0]
    return jnp.sum(x**2)


def in_loop(name: str) -> bool:
    return re.search(r"scan(:\d+)?/", name) is not None


POLICY = jact.Policy(default="int8", min_bytes=1024)


@pytest.mark.oldest
@pytest.mark.parametrize("loss", [looped, nested, two_loops])
def test_gradients_are_close(loss: Any) -> None:
    want = jax.jit(jax.value_and_grad(loss))(W, X)
    got = jax.jit(jact.value_and_grad(loss, policy=POLICY))(W, X)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    cases.assert_close(got[1], want[1], 0.02)


@pytest.mark.parametrize("loss", [looped, nested, two_loops])
def test_plans_reach_into_loops(loss: Any) -> None:
    plan = jact.make_plan(loss, POLICY)(W, X)
    inside = [name for name in plan.bits if in_loop(name)]
    assert len(inside) >= 2 and set(plan.bits.values()) == {"int8"}
    assert jact.make_plan(loss, plan)(W, X) == plan
    same = jax.jit(jact.grad(loss, policy=jact.Plan.from_json(plan.to_json())))(W, X)
    np.testing.assert_array_equal(same, jax.jit(jact.grad(loss, policy=POLICY))(W, X))
    coarse = plan.replace(dict.fromkeys(inside, "int2"))
    codecs = {row.name: row.codec for row in jact.report(loss, coarse)(W, X).rows}
    assert {codecs[name] for name in inside} == {"int2"}


def test_plan_of_another_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="made for another function"):
        jact.grad(two_loops, policy=jact.make_plan(looped, POLICY)(W, X))(W, X)


@pytest.mark.parametrize(("loss", "times"), [(looped, 1), (nested, 2), (two_loops, 2)])
def test_report_counts_all_iterations(loss: Any, times: int) -> None:
    report = jact.report(loss, POLICY)(W, X)
    (carries, *_) = [row for row in report.rows if "carry" in row.name]
    size = ROWS * WIDTH * LAYERS * 4
    assert carries.codec == "int8" and carries.bytes in (size, size * times)
    inside = [row for row in report.rows if in_loop(row.name)]
    # In each iteration the carry and the product.
    assert sum(row.bytes for row in inside) >= 2 * times * size
    assert report.saved_bytes < 0.3 * report.plain_bytes


def test_second_derivatives_through_loops_are_exact() -> None:
    def hessian_product(grad: Any) -> jax.Array:
        return jax.grad(lambda w: jnp.vdot(grad(looped)(w, X), W))(W)

    got = jax.jit(lambda: hessian_product(lambda f: jact.grad(f, policy=POLICY)))()
    want = jax.jit(lambda: hessian_product(jax.grad))()
    # The gradient itself is part of the result, and that one is compressed.
    cases.assert_close(got, want, 0.02)
