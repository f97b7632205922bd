"""What waits in the backward pass, and what of that a device's compiler cannot take."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jact
from jact import compat
from tests.flax.checks import equations
from tests.transform import cases

X, V, W = cases.normal(0, 256, 64), cases.normal(1, 64, 128), cases.normal(2, 128, 64)


def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    v, w = weights
    return jnp.mean((x + jax.nn.gelu(x @ v) @ w) ** 2)


def test_cotangents_wait_for_what_is_decoded_alone() -> None:
    """GELU's derivative is read by four equations: one fusion, if nothing in it has to wait."""
    jaxpr = jax.make_jaxpr(jact.grad(loss, policy="int4"))((V, W), X)
    barriers = [e for e in equations(jaxpr) if "barrier" in e.primitive.name]
    groups = [[(v.aval.dtype.name, v.aval.shape) for v in e.invars] for e in barriers]
    with_cotangents = [group for group in groups if ("float32", (256, 128)) in group]
    # The result in the forward pass, and the one cotangent that its derivative is for.
    assert len(with_cotangents) == 2
    assert all(("uint4", (256, 128)) in group for group in with_cotangents)


def test_products_wait_in_two_dimensions() -> None:
    """A product in three leaves a reshape before the barrier, and is not written over behind it."""

    def lowered(x: jax.Array) -> str:
        gradient = jax.jit(jact.grad(loss, policy="int4"))
        return gradient.trace((V, W), x).lower(lowering_platforms=("cuda",)).as_text()

    def barriers(text: str) -> list[str]:
        return re.findall(r"optimization_barrier .*? : (.*)", text)

    # The cotangent of the hidden layer is made from one that is half as large; the result of the
    # forward pass lies where the function has it.
    in_three = barriers(lowered(X.reshape(4, 64, 64)))
    assert sum("tensor<256x128xf32>" in types for types in in_three) == 1
    assert sum("tensor<4x64x128xf32>" in types for types in in_three) == 1
    assert sum("tensor<256x128xf32>" in types for types in barriers(lowered(X))) == 2


@pytest.mark.parametrize("policy", ["int2", "hybrid2"])
def test_codes_of_two_bits_wait_alone_on_a_tpu(policy: str) -> None:
    """Its compiler aborts the process where a barrier over several arrays has one of two bits."""
    gradient = jax.jit(jact.grad(loss, policy=policy))

    def barriers(platform: str) -> list[str]:
        text = gradient.trace((V, W), X).lower(lowering_platforms=(platform,)).as_text()
        return re.findall(r"optimization_barrier .*? : (.*)", text)

    of_tpu, of_gpu = (
        [types for types in barriers(platform) if "xui2>" in types] for platform in ("tpu", "cuda")
    )
    assert of_tpu and of_gpu and all(", " in types for types in of_gpu)
    assert all(", " not in types for types in of_tpu)


def test_derivatives_are_encoded_before_the_function_goes_on() -> None:
    """Where the derivative and the result are saved, one of them is in memory at a time."""
    policy = jact.Policy(default="int4", derivatives=True)
    eqns = list(equations(jax.make_jaxpr(jact.grad(loss, policy=policy))((V, W), X)))
    results = [
        e
        for e in eqns
        if "barrier" in e.primitive.name
        and [v.aval.shape for v in e.invars if v.aval.dtype == jnp.float32] == [(256, 128)]
    ]
    # The result waits for the code of the derivative, then its reader for the code of the result.
    ranges = [[v.aval.dtype.name for v in e.invars].count("uint4") for e in results]
    assert ranges[:2] == [1, 1]


@pytest.mark.parametrize("shape", [(8, 16), (2, 4, 16)])
def test_values_pass(shape: tuple[int, ...]) -> None:
    arrays: Any = (jnp.arange(8).astype(jnp.uint2), X, product := cases.normal(3, *shape))
    got = jax.jit(lambda a, b: compat.barrier((a, b[1]), V, [b[1]]))(arrays[:2], (X, product))
    want = ((arrays[:2], product), V)
    jax.tree.map(lambda a, b: bool((a == b).all()) or pytest.fail("differs"), got, want)
