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


def test_values_pass() -> None:
    arrays: Any = (jnp.arange(8).astype(jnp.uint2), X)
    got = jax.jit(compat.barrier)(arrays, V)
    jax.tree.map(lambda a, b: bool((a == b).all()) or pytest.fail("differs"), got, (arrays, V))
