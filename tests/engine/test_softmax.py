"""Quotients of exponentials: softmax in any spelling, and what only looks like one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jact
from tests.transform import cases

SIZE = 32
X = cases.normal(0, SIZE, SIZE)
W = cases.normal(1, SIZE, SIZE, scale=0.2)
WEIGHTS = cases.normal(2, SIZE, SIZE)

SOFTMAXES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "library": lambda h: jax.nn.softmax(h),
    "columns": lambda h: jax.nn.softmax(h, axis=0),
    "keepdims": lambda h: (lambda e: e / e.sum(1, keepdims=True))(jnp.exp(h)),
    "new_axis": lambda h: (lambda e: e / e.sum(1)[:, None])(jnp.exp(h)),
    "whole": lambda h: (lambda e: e / e.sum())(jnp.exp(h)),
}
OTHERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "rows_by_columns": lambda e: e / e.sum(1)[None],
    "three_axes": lambda e: (
        e.reshape(4, 8, 8, 4) / e.reshape(4, 8, 8, 4).sum(1)[:, :, None]
    ).reshape(SIZE, SIZE),
    "repeated": lambda e: e / jnp.broadcast_to(e[None], (3, SIZE, SIZE)).sum(0),
    "flat": lambda e: e / e.reshape(-1).sum(),
    "transposed": lambda e: e / e.T.sum(1, keepdims=True),
}


def check(function: Callable[[jax.Array], jax.Array]) -> list[str]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(function(x @ w) ** 2 * WEIGHTS)

    policy = jact.Policy(default="keep")
    cases.assert_close(jact.grad(loss, policy=policy)(W, X), jax.grad(loss)(W, X), 1e-5)
    return [row.name for row in jact.report(loss, policy)(W, X).rows]


@pytest.mark.parametrize("name", SOFTMAXES)
def test_backward_pass_reads_the_result(name: str) -> None:
    assert not [row for row in check(SOFTMAXES[name]) if row.endswith("reduce_sum")]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_softmax_is_left_alone(name: str) -> None:
    check(lambda h: OTHERS[name](jnp.exp(h)))
