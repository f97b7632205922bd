"""Wrong uses raise, early and with a message that names what is wrong."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
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
        (lambda: jact.grad(net, PARAMS, X), TypeError, r"argnums must be.*\(loss\)\(params"),
        (lambda: jact.value_and_grad(net, X), TypeError, "argnums must be an integer"),
        (lambda: jact.grad(net, argnums=(0, "1")), TypeError, "argnums must be an integer"),
        (lambda: jact.compress(net, keep=1.5), TypeError, "keep must hold"),
        (lambda: jact.Policy(rules=jact.Rule("*", "int4")), TypeError, "rules must be a sequence"),
        (lambda: jact.Policy(default="off"), ValueError, 'say "keep"'),
        (lambda: jact.Rule("*", "int9"), ValueError, "recompute"),
        (lambda: jact.Rule("*", "INT4"), ValueError, 'did you mean "int4"'),
        (lambda: jact.Policy(default="kep"), ValueError, 'did you mean "keep"'),
        (lambda: jact.grad(net, policy="INT4"), ValueError, 'did you mean "int4"'),
        (lambda: jact.grad(net, policy="gact-1"), ValueError, 'did you mean "gact-l1"'),
        (lambda: jact.codecs.resolve("bfl6"), ValueError, 'did you mean "bf16"'),
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


def test_the_choices_of_a_rule_are_told_once() -> None:
    with pytest.raises(ValueError, match="codec must be one of") as caught:
        jact.Rule("*", "int9")
    choices = str(caught.value).partition(", or a codec")[0].removeprefix("codec must be one of ")
    names = choices.split(", ")
    assert {"keep", "recompute", "int4"} < set(names) and len(names) == len(set(names))


CONCRETE: dict[str, Any] = {
    "if": lambda w, x, flag: jnp.sum(w * x) if flag else jnp.sum(w),
    "int": lambda w, x, flag: jnp.sum(w[: int(flag)] * x[0]),
    "numpy": lambda w, x, flag: jnp.sum(w) * float(np.sum(flag)),
    "mask": lambda w, x, flag: jnp.sum(w * x[x > 0].sum()),
}


@pytest.mark.parametrize("name", CONCRETE)
def test_values_that_tracing_lacks(name: str) -> None:
    args = jnp.ones(3), jnp.ones(3), jnp.array(1)
    jax.grad(CONCRETE[name])(*args)
    nested = lambda *args: jact.compress(CONCRETE[name])(*args)  # noqa: E731
    for fun in (CONCRETE[name], nested):
        with pytest.raises(Exception, match="traced|boolean|Tracer") as caught:  # noqa: PT011
            jact.grad(fun)(*args)
        notes = [note for note in caught.value.__notes__ if "jact traces the whole" in note]
        assert len(notes) == 1 and "jax.lax.cond or jnp.where" in notes[0]
    # Whatever else is raised is none of it.
    with pytest.raises(KeyError) as other:
        jact.grad(lambda w: {}["missing"])(jnp.ones(3))
    assert not any("jact" in note for note in getattr(other.value, "__notes__", ()))


SYMBOLIC: dict[str, Any] = {
    "grad": lambda: jact.grad(net),
    "value_and_grad": lambda: jact.value_and_grad(net, argnums=(0, 1)),
    "compress": lambda: jax.grad(jact.compress(net)),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_shapes(name: str) -> None:
    (batch,) = jax.export.symbolic_shape("batch,")
    x = jax.ShapeDtypeStruct((batch, X.shape[1]), X.dtype)
    with pytest.raises(NotImplementedError, match=r"symbolic shapes.*\(batch, "):
        jax.export.export(jax.jit(SYMBOLIC[name]()))(PARAMS, x)
    with pytest.raises(NotImplementedError, match="symbolic shapes"):
        jact.make_plan(net)(PARAMS, x)


def test_symbolic_shapes_without_a_gradient() -> None:
    (batch,) = jax.export.symbolic_shape("batch,")
    x = jax.ShapeDtypeStruct((batch, X.shape[1]), X.dtype)
    for fun in (jact.compress(net), jact.grad(net, policy="off")):
        exported = jax.export.export(jax.jit(fun))(PARAMS, x)
        cases.assert_close(exported.call(PARAMS, X), jax.jit(fun)(PARAMS, X), 1e-5)


def test_export_for_a_gpu() -> None:
    """What docs/limits.md says of it. No GPU and no plugin is needed."""
    gradient = jax.jit(jact.grad(net, policy=jact.Policy(min_bytes=0)))
    with pytest.raises(ValueError, match="LayoutConstraint"):
        jax.export.export(gradient, platforms=["cuda"])(PARAMS, X)
    checks = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    exported = jax.export.export(gradient, platforms=["cuda"], disabled_checks=checks)(PARAMS, X)
    assert exported.platforms == ("cuda",)
    assert jax.export.export(gradient, platforms=["cpu", "tpu"])(PARAMS, X).platforms


def test_plan_prints_itself_as_a_table() -> None:
    plan = jact.make_plan(net, jact.Policy(min_bytes=0))(PARAMS, X)
    title, *lines = str(plan).splitlines()
    assert title == f"plan of {len(plan.entries)} residuals" and len(lines) == len(plan.entries)
    assert [tuple(line.split()) for line in lines] == list(plan.bits.items())
    assert len({line.rindex(" ") for line in lines}) == 1
    assert repr(plan).startswith("Plan(entries=((")
    with pytest.raises(ValueError, match='did you mean "dot_general"'):
        plan.replace({"Dot_general": "int8"})
