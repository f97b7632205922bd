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


@pytest.mark.parametrize("policy", ["int2", "int8"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_an_explicit_mesh_of_one_device(policy: str, platform: str) -> None:
    """Whose types say that an array is divided, and forbid to join a divided axis to another."""
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X.reshape(4, 64, 64), jax.P(None, "x"))
        gradient = jax.jit(jact.grad(loss, policy=policy))
        gradient.trace((V, W), x).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("policy", ["int2", "int3", "hybrid2", "avg4-int2"])
def test_a_tpu_meets_no_integers_of_two_bits(policy: str) -> None:
    """Its compiler widens them, refuses them in loops, or aborts the process."""

    def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    gradient = jax.jit(jact.grad(scanned, policy=jact.Policy(default=policy, min_bytes=0)))
    traced = gradient.trace(jnp.stack([V[:, :64]] * 3), X.reshape(4, 64, 64))
    of_tpu, of_gpu = (
        traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cuda")
    )
    assert "ui8>" in of_tpu and "ui2>" not in of_tpu
    assert "ui2>" in of_gpu


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
    arrays: Any = (jnp.arange(8).astype(jnp.uint4), X, product := cases.normal(3, *shape))
    got = jax.jit(lambda a, b: compat.barrier((a, b[1]), V, [b[1]]))(arrays[:2], (X, product))
    want = ((arrays[:2], product), V)
    jax.tree.map(lambda a, b: bool((a == b).all()) or pytest.fail("differs"), got, want)
