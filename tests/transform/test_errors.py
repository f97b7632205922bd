"""Wrong uses raise, early and with a message that names what is wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jact
from tests.transform import cases
from tests.transform.cases import PARAMS, W, X, net

pytestmark = pytest.mark.oldest

transforms = pytest.mark.parametrize("transform", [jact.compress, jact.grad, jact.value_and_grad])


@transforms
def test_unknown_preset(transform: Any) -> None:
    with pytest.raises(ValueError, match=r"policy.*int8.*int4.*'int9'"):
        transform(net, policy="int9")


@transforms
@pytest.mark.parametrize("policy", [4, None, {"bits": 4}])
def test_policy_of_the_wrong_type(transform: Any, policy: Any) -> None:
    with pytest.raises(TypeError, match="policy must be"):
        transform(net, policy=policy)


@transforms
def test_not_callable(transform: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        transform(3)


@pytest.mark.parametrize(
    ("keep", "error"), [(1.5, TypeError), ((1.5,), TypeError), (True, TypeError), (-1, ValueError)]
)
def test_keep(keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep|iterable"):
        jact.compress(net, keep=keep)


@pytest.mark.parametrize("bits", [0, 9, 16])
def test_bits(bits: int) -> None:
    with pytest.raises(ValueError, match="bits must be 1 to 8"):
        jact.codecs.Quantize(bits=bits)


#: What JAX refuses, jact refuses with the same error.
WRONG: dict[str, Any] = {
    "output is not a scalar": lambda grad: grad(lambda p: X @ p[0])(PARAMS),
    "output is a pair": lambda grad: grad(lambda p: (net(p, X), 1))(PARAMS),
    "output is None": lambda grad: grad(lambda p: None)(PARAMS),
    "output is an integer": lambda grad: grad(lambda p: jnp.int32(1))(PARAMS),
    "output is complex": lambda grad: grad(lambda p: net(p, X).astype(jnp.complex64))(PARAMS),
    "argument is an integer": lambda grad: grad(lambda i: net(PARAMS, X))(jnp.arange(3)),
    "argument is a Python integer": lambda grad: grad(lambda i: i * 2.0)(3),
    "argument is a string": lambda grad: grad(lambda s: net(PARAMS, X))("a"),
    "argnums beyond the arguments": lambda grad: grad(net, argnums=2)(PARAMS, X),
    "argnums before the arguments": lambda grad: grad(net, argnums=-3)(PARAMS, X),
    "argnums is a float": lambda grad: grad(net, argnums=0.5)(PARAMS, X),
    "no positional argument": lambda grad: grad(net)(params=PARAMS, x=X),
    "aux without a pair": lambda grad: grad(net, has_aux=True)(PARAMS, X),
    "aux with a triple": lambda grad: grad(lambda p: (net(p, X), 1, 2), has_aux=True)(PARAMS),
    "the function's own error": lambda grad: grad(lambda p: {}["missing"])(PARAMS),
}


@pytest.mark.parametrize("name", WRONG)
def test_same_error_as_jax(name: str) -> None:
    with pytest.raises(Exception) as plain:  # noqa: PT011
        WRONG[name](jax.grad)
    with pytest.raises(type(plain.value)):
        WRONG[name](jact.grad)


def test_rule_that_matches_nothing_warns() -> None:
    policy = jact.Policy(rules=[jact.Rule("nothing/*", "int8")])
    with pytest.warns(UserWarning, match="'nothing/\\*' matches no residual"):
        jact.grad(net, policy=policy)(PARAMS, X)


@pytest.mark.parametrize("name", ["dot_general", "dot_general:1", "dot_general*"])
@pytest.mark.parametrize("action", ["recompute", "keep", "int8"])
def test_rule_that_matches_does_not_warn(name: str, action: str) -> None:
    """Also one whose residual is then not saved. (Warnings are errors here.)"""
    policy = jact.Policy(rules=[jact.Rule(name, action)], default="int8")
    got = jax.jit(jact.grad(net, policy=policy))(PARAMS, X)
    cases.assert_close(got, jax.grad(net)(PARAMS, X), 0.01)


def test_plan_of_another_function() -> None:
    plan = jact.make_plan(net, "int4")(PARAMS, X)
    with pytest.raises(ValueError, match=r"another function.*dot_general:2"):
        jact.grad(
            lambda p: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(X @ p[0]) @ p[1]) @ p[0])), policy=plan
        )(PARAMS)
    with pytest.raises(ValueError, match=r"another function.*has no dot_general:1"):
        jact.grad(lambda w: jnp.sum(jnp.tanh(X @ w)), policy=plan)(W)


def test_plan_of_a_function_left_alone() -> None:
    with pytest.raises(ValueError, match="off"):
        jact.make_plan(net, "off")(PARAMS, X)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: jact.grad(net, "int2"), TypeError, "argnums.*policy='int2'"),
        (lambda: jact.compress(net, keep=1.5), TypeError, "keep must hold"),
        (lambda: jact.Policy(rules=jact.Rule("*", "int4")), TypeError, "rules must be a sequence"),
        (lambda: jact.Policy(default="off"), ValueError, 'say "keep"'),
        (lambda: jact.Rule("*", "int9"), ValueError, "recompute"),
        (lambda: jact.Rule("*", "int4", dtype="floaty"), ValueError, "dtype must be"),
        (lambda: jact.Rule("*", "int4", rank="x"), TypeError, "rank must be"),
        (lambda: jact.Rule("*", "int4", min_size=9, max_size=2), ValueError, "max_size must be"),
        (lambda: jact.codecs.Quantize(bits="4"), ValueError, "got '4'"),
        (lambda: jact.Plan.from_json("{}"), ValueError, "not that of a plan"),
        (lambda: jact.Plan.from_json("hello"), ValueError, "not that of a plan"),
        (lambda: jact.report(lambda p: (net(p, X), 1.0 * X))(PARAMS), TypeError, "a scalar"),
    ],
)
def test_message_names_the_argument(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_unused_rule_warns_at_the_users_line() -> None:
    policy = jact.Policy(rules=[jact.Rule("nothing/*", "int8")])
    with pytest.warns(UserWarning, match="'nothing/\\*'.*dot_general") as records:
        jact.make_plan(net, policy)(PARAMS, X)
    assert records[0].filename == __file__
