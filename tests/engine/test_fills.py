"""Infinities and huge constants in the place of elements that are masked, or not there yet."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
import pytest
from jax import lax

import jact
from tests.transform import cases

X = cases.normal(0, 64, 32)
W = cases.normal(1, 32, 32, scale=0.18)
V = cases.normal(2, 32, 32, scale=0.3)
MASK = cases.normal(3, 64, 32) > 0
FILLS = [-float("inf"), -1e4]


def check(loss: Any, *args: Any, int8: float = 0.03, int4: float = 0.3) -> None:
    cases.assert_gradients_close(loss, args, int8=int8, int4=int4)


#: What reads masked values.
READERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "exp": jnp.exp,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda h: jax.nn.logsumexp(h, -1, keepdims=True),
    "sort": lambda h: jax.nn.sigmoid(jnp.sort(h)),
    "top_k": lambda h: jax.nn.sigmoid(lax.top_k(h, 32)[0]),
    "scaled": lambda h: jax.nn.sigmoid(2 * h.T).T,
    "maximum": lambda h: jnp.tanh(jnp.max(h, -1, keepdims=True)),
    "cumulative": lambda h: jnp.exp(lax.cumlogsumexp(h, axis=1) / 8),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "cumulative")) for n in READERS]
)
def test_masked_values_do_not_drown_the_others(name: str, fill: float) -> None:
    def loss(w: jax.Array) -> jax.Array:
        h = jnp.where(MASK, X @ w, fill)
        return jnp.mean((READERS[name](h) @ V[: READERS[name](h).shape[1]]) ** 2)

    check(loss, W)


def test_masks_that_are_added() -> None:
    def loss(w: jax.Array) -> jax.Array:
        h = X @ w + (1.0 - MASK.astype(jnp.float32)) * -1e9
        return jnp.mean((jax.nn.sigmoid(h) @ V) ** 2)

    check(loss, W)


@pytest.mark.parametrize("fill", [-float("inf"), -1e30])
def test_attention_with_a_running_maximum(fill: float) -> None:
    """Milakov and Gimelshein (2018): the maximum of no scores at all is the loop's first carry."""
    keys, values = cases.normal(4, 4, 8, 32), cases.normal(5, 4, 8, 32)

    def loss(w: jax.Array) -> jax.Array:
        q = X @ w

        def step(carry: Any, block: Any) -> tuple[Any, None]:
            highest, total, out = carry
            scores = q @ block[0].T / 6
            new = jnp.maximum(highest, scores.max(-1))
            terms, decay = jnp.exp(scores - new[:, None]), jnp.exp(highest - new)
            total = total * decay + terms.sum(-1)
            return (new, total, out * decay[:, None] + terms @ block[1]), None

        first = (jnp.full(64, fill), jnp.zeros(64), jnp.zeros((64, 32)))
        (_, total, out), _ = lax.scan(step, first, (keys, values))
        return jnp.mean((out / total[:, None] @ V) ** 2)

    check(loss, W)


@pytest.mark.parametrize("start", ["constant", "scattered", "masked"])
def test_states_that_cannot_be_reached_yet(start: str) -> None:
    """The forward algorithm of a hidden Markov model begins in one state."""
    begin = np.full((64, 32), -np.inf, np.float32)
    begin[:, 0] = 0
    steps = cases.normal(6, 3, 64, 32)

    def loss(w: jax.Array) -> jax.Array:
        if start == "constant":
            first = jnp.asarray(begin)
        elif start == "scattered":
            first = jnp.full((64, 32), -jnp.inf).at[:, 0].set(0.0)
        else:
            first = jnp.where(jnp.arange(32) < 20, X @ w, -jnp.inf)

        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.logsumexp(state[:, :, None] + w[None], 1) + jnp.tanh(x @ w), None

        last, _ = lax.scan(step, first, steps)
        return jnp.mean(jax.nn.logsumexp(last, -1))

    check(loss, W)


def test_what_is_masked_is_saved_before() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((jnp.exp(jnp.where(MASK, X @ w, -jnp.inf)) @ V) ** 2)

    plan = jact.make_plan(loss, jact.Policy(default="int4", min_bytes=0))(W)
    assert plan.bits == {"dot_general": "int4", "dot_general:1": "int4"}


@pytest.mark.parametrize("function", [jsp.xlogy, lambda p, _: jsp.entr(p)])
def test_logarithms_of_zeros(function: Any) -> None:
    """Where an exact mask takes the gradient away, JAX's is finite, and so is ours."""

    def loss(w: jax.Array) -> jax.Array:
        p = jax.nn.relu(jnp.sin(X @ w))
        return jnp.sum(function(p, p))

    check(loss, W)
