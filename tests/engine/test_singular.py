"""Functions that magnify small errors near some argument: logarithms, roots, quotients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jact
from jact.engine import positive, program
from tests.transform import cases

X = cases.normal(0, 128, 32)
W = cases.normal(1, 32, 32, scale=0.18)
V = cases.normal(2, 32, 64, scale=0.4)
T = cases.normal(3, 128, 64)
ONE_HOT = jax.nn.one_hot(jnp.arange(128) * 7 % 64, 64)


def check(loss: Any, int8: float, int4: float) -> None:
    cases.assert_gradients_close(loss, ((W, V), X), int8=int8, int4=int4)


def network(function: Any) -> Any:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((function(x @ params[0]) @ params[1]) ** 2)

    return loss


def head(function: Any, scale: float = 3) -> Any:
    """What a function makes of wide outputs, as at the end of a network."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(function(scale * (jax.nn.gelu(x @ params[0]) @ params[1])))

    return loss


def guarded(h: jax.Array) -> jax.Array:
    small = jnp.abs(h) < 1e-3
    return jnp.where(small, 1.0, jnp.expm1(h) / jnp.where(small, 1.0, h))


SINGULAR: dict[str, Any] = {
    "guarded": guarded,
    "unit": lambda h: h * jax.lax.rsqrt(h * h + 1e-4),
    "ratio": lambda h: h / (jnp.abs(h) + 1e-3),
    "charbonnier": lambda h: jnp.sqrt(h * h + 1e-6),
    "log_cosh": lambda h: jnp.log(jnp.cosh(h)),
}


@pytest.mark.parametrize("choice", [None, False])
@pytest.mark.parametrize("name", SINGULAR)
def test_singular_functions_are_not_made_again_step_by_step(name: str, choice: bool | None) -> None:
    """Near zero, a decoded argument and an exact reciprocal would not belong together."""
    loss = network(SINGULAR[name])
    want = jax.jit(jax.grad(loss))((W, V), X)
    for codec, error in (("int8", 0.02), ("int4", 0.2)):
        policy = jact.Policy(default=codec, min_bytes=0, derivatives=choice)
        got = jax.jit(jact.grad(loss, policy=policy))((W, V), X)
        cases.assert_close(got, want, error)


def kullback_leibler(h: jax.Array) -> jax.Array:
    p = jax.nn.softmax(h)
    return p * (jnp.log(p) - jnp.log(jax.nn.softmax(T)))


def binary_cross_entropy(h: jax.Array) -> jax.Array:
    p = jax.nn.sigmoid(h)
    return -ONE_HOT * jnp.log(p + 1e-7) - (1 - ONE_HOT) * jnp.log(1 - p + 1e-7)


def recurrent_gate(h: jax.Array) -> jax.Array:
    a = jnp.exp(-6 * jax.nn.sigmoid(h))
    return jnp.sqrt(1 - a**2 + 1e-6) * T


def neighbours(h: jax.Array) -> jax.Array:
    near = 1 / (1 + jnp.sum((h[:, None, :8] - h[None, :, :8]) ** 2, -1))
    return -jax.nn.softmax(T @ T.T) * jnp.log(near / near.sum())


#: Here a singular function reads what is left of a function that saturates, and is far smaller than
#: what a code of it errs by.
SATURATED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "log_softmax": lambda h: -ONE_HOT * jnp.log(jax.nn.softmax(h) + 1e-9),
    "entropy": lambda h: (lambda p: -p * jnp.log(p + 1e-9))(jax.nn.softmax(h)),
    "kullback_leibler": kullback_leibler,
    "binary_cross_entropy": binary_cross_entropy,
    "focal": lambda h: (lambda p: -ONE_HOT * (1 - p) ** 2 * jnp.log(p + 1e-7))(jax.nn.sigmoid(h)),
    "squashed": lambda h: jnp.log(1 - jnp.tanh(h) ** 2 + 1e-6),
    "hellinger": lambda h: (jnp.sqrt(jax.nn.softmax(h)) - jnp.sqrt(jax.nn.softmax(T))) ** 2,
    "recurrent_gate": recurrent_gate,
    "odds": lambda h: (lambda p: p / (1 - p))(jax.nn.sigmoid(h / 3)),
    "neighbours": neighbours,
}


@pytest.mark.parametrize("name", SATURATED)
def test_what_saturates_is_made_again_for_singular_functions(name: str) -> None:
    check(head(SATURATED[name]), 0.04, 0.25)


#: Written out, where JAX has a function of its own.
BOUNDED: dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]] = {
    "sigmoid": (lambda h: T / (1 + jnp.exp(-h)), lambda h: T * jax.nn.sigmoid(h)),
    "silu": (lambda h: h / (1 + jnp.exp(-h)), jax.nn.silu),
    "softplus": (lambda h: jnp.log(1 + jnp.exp(h)), lambda h: jnp.log1p(jnp.exp(h))),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_bounded_away_from_zero_is_not_singular(name: str) -> None:
    loss, known = (head(function, 1) for function in BOUNDED[name])
    check(loss, 0.02, 0.3)
    report, want = (
        jact.report(f, jact.Policy(default="int4", min_bytes=0))((W, V), X) for f in (loss, known)
    )
    assert not [row for row in report.rows if "singular" in row.why]
    assert report.saved_bytes == want.saved_bytes


def test_divisors_of_the_backward_pass_keep_their_magnitudes() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        a, b = x @ params[0], jnp.abs(x @ params[1]) + 1e-2
        return jnp.mean((jnp.sin(a) / b[:, :32]) @ params[1])

    check(loss, 0.1, 0.8)
    rows = jact.report(loss, jact.Policy(default="int4", min_bytes=0))((W, V), X).rows
    assert {row.codec for row in rows if "divisor" in row.why} == {"bf16"}


def spd(h: jax.Array) -> jax.Array:
    return h @ h.T / 8 + jnp.eye(len(h))


MATRICES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "solve": lambda a, b: jnp.linalg.solve(jnp.eye(len(a)) + jnp.sin(a), b),
    "inverse": lambda a, b: jnp.linalg.inv(jnp.eye(len(a)) * 1e6 + jnp.sin(a)) @ b * 1e6,
    "cholesky": lambda a, b: jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(spd(a)), b, lower=True
    ),
    "qr": lambda a, b: jnp.linalg.qr(jnp.eye(len(a)) + jnp.sin(a))[0] @ b,
    "eigh": lambda a, b: jnp.linalg.eigvalsh(spd(a)) * b.sum(0)[: len(a)],
    "determinant": lambda a, b: jnp.linalg.slogdet(spd(a))[1] * b,
    "exponential": lambda a, b: jax.scipy.linalg.expm(a / 4) @ b,
}


@pytest.mark.parametrize("name", MATRICES)
def test_factors_of_matrices_are_exact(name: str) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ params[0])
        return jnp.mean(MATRICES[name](h[:32] / 4, h[32:64] @ params[1]) ** 2)

    check(loss, 0.03, 0.5)
    rows = jact.report(loss, jact.Policy(default="int4", min_bytes=0))((W, V), X).rows
    assert all(row.exact for row in rows if row.name.split(":")[0] in ("lu", "cholesky", "qr"))


def test_rules_and_plans_say_otherwise() -> None:
    loss = head(SATURATED["log_softmax"])
    policy = jact.Policy(rules=(jact.Rule("derivative", "int8"),), default="int4", min_bytes=0)
    plan = jact.make_plan(loss, policy)((W, V), X)
    assert plan.codecs["derivative"].name == "int8"
    assert {codec.name for codec in plan.codecs.values()} == {"int4", "int8", "bf16"}


def test_dead_channels_do_not_drown_the_others() -> None:
    """A normalisation over few rows, to which some channels bring zeros and so a reciprocal of 1e6.

    In one group with that, codes of equal steps would bring back zeros for the others.
    """
    alive = jnp.arange(1024) % 8 > 0

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.where(alive, (x @ params[0]).reshape(4, 1024), 0.0)
        h = (h - h.mean(0, keepdims=True)) * jax.lax.rsqrt(h.var(0, keepdims=True) + 1e-6)
        return jnp.mean((h.reshape(len(x), -1) @ params[1]) ** 2)

    check(loss, 0.05, 0.7)
    rows = jact.report(loss, jact.Policy(default="int4", min_bytes=0))((W, V), X).rows
    assert {row.codec for row in rows if "singular" in row.why} == {"bf16"}


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (lambda x: 1 + jnp.exp(-x), positive.Sign.BOUNDED),
        (lambda x: jnp.sqrt(jnp.exp(x).sum() + 2.0), positive.Sign.BOUNDED),
        (lambda x: (1 + jnp.exp(x)) * jnp.maximum(jax.lax.logistic(x), 0.1), positive.Sign.BOUNDED),
        (lambda x: jnp.exp(x) + 1e-9, positive.Sign.POSITIVE),
        (lambda x: 1 / (1 + jnp.exp(x)), positive.Sign.POSITIVE),
        (lambda x: jnp.log1p(jnp.exp(x)), positive.Sign.POSITIVE),
        (lambda x: jax.nn.softmax(x), positive.Sign.POSITIVE),
        (lambda x: 1 + x * x, positive.Sign.BOUNDED),
        (lambda x: jnp.cosh(x) + jnp.abs(x) ** 3, positive.Sign.BOUNDED),
        (lambda x: jnp.maximum(x, 0.5), positive.Sign.BOUNDED),
        (lambda x: 1 / (x**4 + 1e-6), positive.Sign.POSITIVE),
        (lambda x: jnp.sqrt(jax.nn.relu(x)), positive.Sign.NONNEGATIVE),
        (lambda x: x**3 + 1, positive.Sign.UNKNOWN),
        (lambda x: 1 - jnp.exp(x), positive.Sign.UNKNOWN),
        (lambda x: jnp.exp(x) + x, positive.Sign.UNKNOWN),
        (lambda x: jnp.log(1 + jnp.exp(x)), positive.Sign.UNKNOWN),
    ],
)
def test_signs(function: Any, sign: positive.Sign) -> None:
    flat = program.flatten(jax.make_jaxpr(function)(jnp.ones((4, 8))))
    assert positive.signs(flat.eqns).get(flat.outvars[0], positive.Sign.UNKNOWN) == sign
