"""Rules reach what reports show by its name, or its last parts, wherever it is; others warn."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jact
from tests.transform import cases

WIDTH = 64
X = jax.random.normal(jax.random.key(0), (256, WIDTH))
W = jax.random.normal(jax.random.key(1), (3, WIDTH, WIDTH)) / WIDTH**0.5


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("layers"):
        x, _ = jax.lax.scan(lambda h, u: (jnp.tanh(h @ u), None), jnp.tanh(x @ w[0]), w)
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ w[1]) ** 2)


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, u: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("inner"):
            return jax.lax.fori_loop(0, 2, lambda i, g: jnp.tanh(g @ u), h), None

    return jnp.mean(jax.lax.scan(step, x, w)[0] ** 2)


def branched(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("choice"):
        y = jax.lax.cond(
            x[0, 0] > 0, lambda x: jnp.tanh(x @ w[0]), lambda x: jnp.sin(x @ w[1]) @ w[2], x
        )
    return jnp.mean(jnp.tanh(y) ** 2)


def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda h, u: (jnp.tanh(h @ u), None), jnp.tanh(x @ w[0]), w)
        return x

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    return jnp.mean(run(w, x) ** 2)


FUNCTIONS = [looped, nested, branched, mapped]


def codecs(fun: Callable[..., Any], *rules: jact.Rule) -> dict[str, str]:
    policy = jact.Policy(rules=rules, default="int4", min_bytes=1024)
    return {row.name: row.codec for row in jact.report(fun, policy)(W, X).rows}


def warnings_of(fun: Callable[..., Any], *rules: jact.Rule) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        codecs(fun, *rules)
    return [str(w.message) for w in caught]


def exactly(name: str) -> str:
    """A pattern for just that name."""
    return re.sub(r"\[", "[[]", name)


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_rules_reach_every_name_of_a_report(fun: Callable[..., Any]) -> None:
    plain = codecs(fun)
    encoded = [name for name, codec in plain.items() if codec == "int4"]
    assert any(name.count("/") >= 1 for name in encoded)
    for name in encoded:
        parts = name.split("/")
        for pattern in ("/".join(parts[i:]) for i in range(len(parts))):
            # Warnings are errors here.
            changed = codecs(fun, jact.Rule(exactly(pattern), "int8"))
            expected = {
                n: "int8" if c == "int4" and ("/" + n).endswith("/" + pattern) else c
                for n, c in plain.items()
            }
            assert changed == expected, pattern


@pytest.mark.parametrize(
    ("fun", "pattern", "within"),
    [
        (looped, "scan/*", "layers/scan/"),
        (looped, "layers/scan/*", "layers/scan/"),
        (nested, "scan/inner/scan/*", "scan/inner/scan/"),
        (nested, "inner/*", "scan/inner/"),
        (branched, "cond/branch_1/*", "choice/cond/branch_1/"),
        (mapped, "shard_map/scan/*", "shard_map/scan/"),
    ],
)
def test_rules_for_bodies(fun: Callable[..., Any], pattern: str, within: str) -> None:
    changed = codecs(fun, jact.Rule(pattern, "int8"))
    inside = {name for name, codec in codecs(fun).items() if codec == "int4" and within in name}
    assert inside and {name for name, codec in changed.items() if codec == "int8"} == inside


def test_a_body_is_recomputed() -> None:
    rule = jact.Rule("scan/dot_general", "recompute")
    assert "layers/scan/dot_general" not in codecs(looped, rule)
    policy = jact.Policy(rules=[rule], default="int8", min_bytes=1024)
    got = jax.jit(jact.grad(looped, policy=policy))(W, X)
    cases.assert_close(got, jax.grad(looped)(W, X), 0.02)


@pytest.mark.parametrize("pattern", ["head/*", "scan/*", "layers/*", "carry*", "dot_general"])
def test_a_rule_that_matches_somewhere_does_not_warn(pattern: str) -> None:
    assert warnings_of(looped, jact.Rule(pattern, "keep")) == []


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_a_rule_that_matches_nowhere_warns_once(fun: Callable[..., Any]) -> None:
    (message,) = warnings_of(fun, jact.Rule("nothing/*", "keep"))
    assert "'nothing/*' matches no residual" in message
    assert warnings_of(fun, jact.Rule("nothing/*", "keep", required=False)) == []


def test_the_message_names_what_is_inside_of_loops() -> None:
    (message,) = warnings_of(looped, jact.Rule("nothing/*", "keep"))
    assert "layers/scan/dot_general" in message


def test_a_rule_for_what_is_small_does_not_warn() -> None:
    policy = jact.Policy(rules=[jact.Rule("carry*", "int8")], min_bytes=10**9)
    jact.make_plan(looped, policy)(W, X)


class TestPreempted:
    def test_by_a_wider_one(self) -> None:
        rules = jact.Rule("dot_general*", "int8"), jact.Rule("scan/dot_general", "keep")
        (message,) = warnings_of(looped, *rules)
        assert (
            "every residual that the rule for 'scan/dot_general' matches is decided by an earlier "
            "one: that for 'dot_general*'"
        ) in message

    def test_by_several(self) -> None:
        patterns = ("layers/*", "head/*", "dot_general")
        (message,) = warnings_of(looped, *(jact.Rule(p, "int8") for p in patterns))
        assert "for 'dot_general' matches" in message
        assert "'layers/*' or 'head/*'" in message

    def test_not_in_the_right_order(self) -> None:
        rules = jact.Rule("scan/dot_general", "keep"), jact.Rule("dot_general*", "int8")
        assert warnings_of(looped, *rules) == []

    def test_not_where_one_residual_is_left_to_it(self) -> None:
        rules = jact.Rule("head/*", "keep"), jact.Rule("dot_general", "int8")
        assert warnings_of(looped, *rules) == []

    def test_not_where_the_earlier_one_asks_for_more(self) -> None:
        rules = jact.Rule("dot_general", "int8", rank=3), jact.Rule("dot_general", "keep")
        assert not any("decided by" in m for m in warnings_of(looped, *rules))

    def test_not_where_it_is_not_required(self) -> None:
        rule = jact.Rule("scan/dot_general", "keep", required=False)
        assert warnings_of(looped, jact.Rule("dot_general*", "int8"), rule) == []

    def test_the_policy_says_which(self) -> None:
        first, second = jact.Rule("dot*", "int8"), jact.Rule("dot_general:1", "keep")
        policy = jact.Policy(rules=[first, second])
        residuals = [("dot_general", (8, 8), "float32"), ("dot_general:1", (8, 8), "float32")]
        assert policy.preempted_rules(residuals) == [(second, [first])]
        assert policy.preempted_rules(residuals[:1]) == []
        assert policy.unused_rules(residuals[:1]) == [second]


def test_policies_are_what_they_were() -> None:
    policy = jact.Policy(rules=[jact.Rule("scan/*", "int8")])
    before = repr(policy), hash(policy)
    codecs(looped, *policy.rules)
    assert (repr(policy), hash(policy)) == before
    assert jact.make_plan(looped, policy)(W, X).basis == policy
