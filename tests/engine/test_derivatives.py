"""What is saved of nonlinear functions: an argument to decode, or derivatives themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact
from tests.transform import cases

ROWS, WIDTH = 4096, 64
X = cases.normal(0, ROWS, WIDTH)
W = cases.normal(1, WIDTH, WIDTH, scale=0.2)
V = cases.normal(2, WIDTH, WIDTH, scale=0.2)
FUNCTIONS: dict[str, Any] = {
    "gelu": jax.nn.gelu,
    "exact_gelu": lambda h: jax.nn.gelu(h, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "cubic": lambda h: h**3 / (1.0 + h * h),
    "squared_relu": lambda h: jnp.square(jax.nn.relu(h)),
    "half": lambda h: jax.nn.silu(h.astype(jnp.bfloat16)).astype(jnp.float32),
}


def policy(bits: int, derivatives: bool | None) -> jact.Policy:
    return jact.Policy(default=jact.codecs.Quantize(bits=bits), derivatives=derivatives)


def network(function: Any) -> Any:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((function(x @ params[0]) @ params[1]) ** 2)

    return loss


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_the_function(name: str) -> None:
    loss = network(FUNCTIONS[name])
    want = jax.jit(jax.value_and_grad(loss))((W, V), X)
    got = jax.jit(jact.value_and_grad(loss, policy=policy(8, True)))((W, V), X)
    # XLA computes with more than bfloat16 where it fuses, and what is saved is not fused.
    np.testing.assert_allclose(got[0], want[0], rtol=2e-3 if name == "half" else 1e-6)
    cases.assert_close(got[1], want[1], 0.01)


@pytest.mark.parametrize("name", ["gelu", "exact_gelu", "silu", "tanh", "cubic", "half"])
def test_one_derivative_for_each_function(name: str) -> None:
    """JAX saves up to six arrays for a GELU; here they are its derivative and its result."""
    report = jact.report(network(FUNCTIONS[name]), policy(8, True))((W, V), X)
    large = [row for row in report.rows if row.shape == (ROWS, WIDTH)]
    # The third is the second product's result, which the mean square reads.
    assert len(large) == 3 and {row.codec for row in large} == {"int8"}
    assert any("derivative" in row.why for row in large)


def bias(loss: Any, derivatives: bool | None) -> float:
    """How much the mean of the gradient over many rows is off, along the gradient itself."""
    want = jax.jit(jax.grad(loss))((W, V), X)
    got = jax.jit(jact.grad(loss, policy=policy(2, derivatives)))((W, V), X)
    pairs = list(zip(map(np.ravel, want), map(np.ravel, got), strict=True))
    return sum(float(a @ (b - a)) for a, b in pairs) / sum(float(a @ a) for a, _ in pairs)


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["gelu", "tanh"])
def test_derivatives_are_unbiased_where_arguments_are_not(name: str) -> None:
    loss = network(FUNCTIONS[name])
    assert abs(bias(loss, True)) < 0.01
    assert abs(bias(loss, False)) > 0.03
    # The default at two bits.
    assert bias(loss, None) == bias(loss, True)


def test_default_saves_arguments_at_four_bits() -> None:
    loss = network(jax.nn.gelu)
    saved = {
        choice: jact.report(loss, policy(4, choice))((W, V), X).saved_bytes
        for choice in (None, False, True)
    }
    assert saved[None] == saved[False] < saved[True]


@pytest.mark.parametrize("step", ["round", "floor", "remainder"])
def test_jumps_are_those_of_the_forward_pass(step: str) -> None:
    function = {"round": jnp.round, "floor": jnp.floor, "remainder": lambda h: h % 0.7}[step]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.sin(x @ w)
        return jnp.mean(h * h * function(h))

    # Of few rows, as the errors of many cancel.
    args = W, X[:64]
    want = jax.jit(jax.grad(loss))(*args)
    cases.assert_close(jax.jit(jact.grad(loss, policy=policy(8, None)))(*args), want, 0.035)


@pytest.mark.parametrize(
    "function",
    [jax.nn.relu, jax.nn.leaky_relu, lambda h: jnp.clip(h, -1, 1), lambda h: jnp.abs(h)],
)
def test_nothing_more_is_saved_of_piecewise_linear_functions(function: Any) -> None:
    """Their derivatives are masks, or constants."""
    loss = network(function)
    plans = [jact.make_plan(loss, policy(2, choice))((W, V), X) for choice in (False, True)]
    assert plans[0].bits == plans[1].bits


def test_in_scans_and_plans() -> None:
    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), x, params)[0] ** 2)

    params = jnp.stack([W, V])
    plan = jact.make_plan(loss, policy(8, True))(params, X)
    again = jact.Plan.from_json(plan.to_json())
    assert again == plan and again.basis.derivatives is True
    want = jax.jit(jax.grad(loss))(params, X)
    cases.assert_close(jax.jit(jact.grad(loss, policy=again))(params, X), want, 0.01)


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match="derivatives must be a bool or None"):
        jact.Policy(derivatives="yes")  # type: ignore[arg-type]
