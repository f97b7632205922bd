"""What docs/why.md says of bias, where no other test shows it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

import jact
from tests.transform import cases

ROWS, WIDTH = 16384, 32


def bias(loss: Any, params: Any, x: jax.Array, bits: int) -> float:
    """The error along the gradient, over so many rows that what is random is small."""
    policy = jact.Policy(default=jact.codecs.Quantize(bits=bits), derivatives=True)
    want = ravel_pytree(jax.jit(jax.grad(loss))(params, x))[0]
    got = ravel_pytree(jax.jit(jact.grad(loss, policy=policy))(params, x))[0]
    return abs(float(want @ (got - want) / (want @ want)))


def normalised(groups: int) -> float:
    """The bias at 2 bits of a network that normalises over `WIDTH / groups` elements."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = (x @ params[0]).reshape(ROWS, groups, WIDTH // groups)
        h = h - h.mean(-1, keepdims=True)
        h = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-3)
        return jnp.mean(jnp.sin(h.reshape(ROWS, WIDTH) @ params[1]) ** 2)

    params = [cases.normal(i, WIDTH, WIDTH, scale=WIDTH**-0.5) for i in range(2)]
    return bias(loss, params, cases.normal(9, ROWS, WIDTH), bits=2)


def test_bias_of_normalisation_falls_with_the_elements() -> None:
    few, many = normalised(8), normalised(1)
    assert few > 4 * many


def test_bias_of_attention_is_that_of_few_bits() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = (x @ w for w in params)
        scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k) / WIDTH**0.5)
        return jnp.mean(jnp.einsum("bst,btd->bsd", scores, v) ** 2)

    params = [cases.normal(i, WIDTH, WIDTH, scale=2 * WIDTH**-0.5) for i in range(3)]
    x = cases.normal(9, ROWS // 64, 64, WIDTH)
    few, many = bias(loss, params, x, bits=2), bias(loss, params, x, bits=4)
    assert few > 0.02 > many
