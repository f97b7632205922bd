"""Quotients of exponentials: softmax in any spelling, and what only looks like one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jact
from tests.transform import cases

SIZE = 32
IDS = jnp.arange(SIZE).reshape(2, SIZE // 2) % 4
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
SEGMENTS = jnp.asarray([0, 3, 0, 1, 3, 3, 1, 0] * (SIZE // 8))


def over_segments(h: jax.Array, ids: jax.Array = SEGMENTS, count: int = 4) -> jax.Array:
    highest = jax.lax.stop_gradient(jax.ops.segment_max(h, ids, count))
    e = jnp.exp(h - highest[ids])
    return e / jax.ops.segment_sum(e, ids, count)[ids]


SOFTMAXES |= {
    "segments": over_segments,
    "segments_mapped": lambda h: jax.vmap(over_segments)(h.reshape(2, -1, SIZE), IDS).reshape(
        SIZE, SIZE
    ),
    "segments_of_nothing": lambda h: over_segments(h, SEGMENTS - 1, 3),
}
OTHERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "rows_by_columns": lambda e: e / e.sum(1)[None],
    "three_axes": lambda e: (
        e.reshape(4, 8, 8, 4) / e.reshape(4, 8, 8, 4).sum(1)[:, :, None]
    ).reshape(SIZE, SIZE),
    "repeated": lambda e: e / jnp.broadcast_to(e[None], (3, SIZE, SIZE)).sum(0),
    "flat": lambda e: e / e.reshape(-1).sum(),
    "transposed": lambda e: e / e.T.sum(1, keepdims=True),
    "other_segments": lambda e: e / jax.ops.segment_sum(e, SEGMENTS, 4)[SEGMENTS[::-1]],
    "from_one": lambda e: e / jnp.ones((4, SIZE)).at[SEGMENTS].add(e)[SEGMENTS],
    "columns_of_segments": lambda e: e / jax.ops.segment_sum(e.T, SEGMENTS, 4)[SEGMENTS],
}


def check(function: Callable[[jax.Array], jax.Array]) -> list[str]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(function(x @ w) ** 2 * WEIGHTS)

    policy = jact.Policy(default="keep")
    cases.assert_close(jact.grad(loss, policy=policy)(W, X), jax.grad(loss)(W, X), 1e-5)
    return [row.name for row in jact.report(loss, policy)(W, X).rows]


@pytest.mark.parametrize("name", SOFTMAXES)
def test_backward_pass_reads_the_result(name: str) -> None:
    sums = ("reduce_sum", "scatter-add")
    assert not [row for row in check(SOFTMAXES[name]) if row.endswith(sums)]


@pytest.mark.parametrize("name", ["library", "segments"])
def test_what_all_terms_have_in_common_does_not_matter(name: str) -> None:
    """A softmax's gradient is orthogonal to it, and inexact weights must not change that."""
    x = cases.normal(3, 1024, SIZE)
    rows = jax.lax.broadcasted_iota(jnp.int32, (1024,), 0) % 200
    function = (lambda h: over_segments(h, rows, 200)) if name == "segments" else SOFTMAXES[name]
    values = cases.normal(4, 1024, SIZE, scale=0.03)

    def loss(w: jax.Array, common: float) -> jax.Array:
        return jnp.sum(function(x @ w) * (values + common))

    def error(policy: jact.Policy, common: float) -> float:
        exact, coded = (g(W, common) for g in (jax.grad(loss), jact.grad(loss, policy=policy)))
        return float(jnp.linalg.norm(coded - exact) / jnp.linalg.norm(exact))

    policy = jact.Policy(default="int8", min_bytes=0)
    assert error(policy, common=1.0) < 1.5 * error(policy, common=0.0) < 0.03


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_softmax_is_left_alone(name: str) -> None:
    check(lambda h: OTHERS[name](jnp.exp(h)))
