"""Plans serve any batch size, and tell another function from the same one at another size."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jact
from tests.transform import cases

WIDTH = 128
BATCHES = (256, 31, 8, 1)
X = jax.random.normal(jax.random.key(0), (256, WIDTH))
W = jax.random.normal(jax.random.key(1), (3, WIDTH, WIDTH)) / WIDTH**0.5


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    for u in w:
        x = jnp.tanh(x @ u)
    return jnp.mean(x.sum(-1) ** 2)


def residual(w: jax.Array, x: jax.Array) -> jax.Array:
    """Streams that meet: their sums are saved, where they are large enough."""
    for u in w:
        x = x + jax.nn.gelu(x @ u)
    return jnp.mean(x.sum(-1) ** 2)


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("layers"):
        x, _ = jax.lax.scan(lambda h, u: (h + jax.nn.gelu(h @ u), None), x @ w[0], w)
    return jnp.mean(x.sum(-1) ** 2)


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    def twice(h: jax.Array, u: jax.Array) -> tuple[jax.Array, None]:
        h = jax.lax.fori_loop(0, 2, lambda i, g: jnp.tanh(g @ u), h)
        return jax.lax.cond(h[0, 0] > 2, jnp.cos, lambda g: jnp.sin(g @ u), h), None

    return jnp.mean(jax.lax.scan(twice, x, w)[0].sum(-1) ** 2)


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.reshape(x @ u, (-1, 1, 4, WIDTH // 4)) for u in w)
    return jnp.mean(jax.nn.dot_product_attention(q, k, v) ** 2)


def compressed_inside(w: jax.Array, x: jax.Array) -> jax.Array:
    return layers(w, jact.compress(looped_part, "int8")(w, x))


def looped_part(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, u: (jnp.tanh(h @ u), None), x, w)[0]


FUNCTIONS = [layers, residual, looped, nested, attention, compressed_inside]


@pytest.mark.parametrize("fun", FUNCTIONS)
@pytest.mark.parametrize("policy", ["int4", jact.Policy(default="int2", derivatives=True)])
def test_a_plan_serves_any_batch(fun: Callable[..., Any], policy: Any) -> None:
    plans = {size: jact.make_plan(fun, policy)(W, X[:size]) for size in BATCHES}
    for made_at in (256, 8):
        plan = jact.Plan.from_json(plans[made_at].to_json())
        for size, expected in plans.items():
            # What the plan has no word for is stored as the policy that it was made from says.
            assert jact.make_plan(fun, plan)(W, X[:size]) == expected


@pytest.mark.parametrize("fun", [layers, looped])
def test_gradients_at_another_batch(fun: Callable[..., Any]) -> None:
    plan = jact.make_plan(fun, "int8")(W, X[:31])
    coarse = plan.replace(dict.fromkeys(plan.bits, "int2"))
    assert not plan.bits or fun is looped
    for size in (256, 1):
        got = jax.jit(jact.grad(fun, policy=plan))(W, X[:size])
        cases.assert_close(got, jax.grad(fun)(W, X[:size]), 0.05)
    codecs = jact.make_plan(fun, coarse)(W, X).bits
    assert {codecs[name] for name in plan.bits} <= {"int2"}


def test_a_plan_speaks_for_what_was_small_in_between() -> None:
    plan = jact.make_plan(looped, "int4")(W, X)
    name = "layers/scan/dot_general"
    fine = plan.replace({name: "int8"})
    assert name not in jact.make_plan(looped, fine)(W, X[:8]).bits
    assert jact.make_plan(looped, fine)(W, X).bits[name] == "int8"


@pytest.mark.parametrize("size", BATCHES)
@pytest.mark.parametrize("made_at", [256, 8])
def test_another_function_is_refused_at_any_batch(made_at: int, size: int) -> None:
    plan = jact.make_plan(layers, "int4")(W, X[:made_at])
    longer = jnp.concatenate([W, W])
    if made_at == 256:
        with pytest.raises(ValueError, match=r"another function.*has no dot_general:2"):
            jact.make_plan(layers, plan)(W[:2], X[:size])
    if size == 256:
        with pytest.raises(ValueError, match=r"another function.*also saves .*dot_general:5"):
            jact.make_plan(layers, plan)(longer, X[:size])
        with pytest.raises(ValueError, match=r"another function.*also saves .*scan/dot_general"):
            jact.make_plan(looped, plan)(W, X[:size])
    if made_at == 256 and size == 8:
        with pytest.raises(ValueError, match=r"another function.*has no .*scan/dot_general"):
            jact.make_plan(layers, jact.make_plan(looped, "int4")(W, X))(W, X[:size])


def test_what_was_recorded_of_the_function() -> None:
    large, small = (jact.make_plan(looped, "int4")(W, X[:n]) for n in (256, 1))
    assert large.operations == small.operations
    assert large.operations == ("layers/scan/dot_general", "layers/dot_general", "layers/scan")
    assert not small.bits
    assert large.replace(dict.fromkeys(large.bits, "int8")).operations == large.operations
    by_hand = jact.Plan(large.entries, large.basis)
    assert by_hand == large and hash(by_hand) == hash(large) and repr(by_hand) == repr(large)


def test_json_from_before() -> None:
    plan = jact.make_plan(layers, "int4")(W, X)
    data = json.loads(plan.to_json())
    del data["operations"]
    old = jact.Plan.from_json(json.dumps(data))
    assert old == plan and old.operations is None
    for size in BATCHES:
        grads = jax.jit(jact.grad(layers, policy=old))(W, X[:size])
        np.testing.assert_array_equal(grads, jax.jit(jact.grad(layers, policy=plan))(W, X[:size]))
    with pytest.raises(ValueError, match="another function.*also saves dot_general:2"):
        jact.make_plan(layers, dataclasses.replace(old, entries=old.entries[:2]))(W, X)


def test_loops_of_functions_compressed_inside_are_no_part_of_a_plan() -> None:
    plan = jact.make_plan(compressed_inside, "int4")(W, X)
    assert "dot_general" in plan.bits and not any(name.startswith("scan/") for name in plan.bits)
    report = jact.report(compressed_inside, plan)(W, X)
    assert any(r.name == "scan/dot_general" and r.codec == "int8" for r in report.rows)


def test_nnx() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in (0, 1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.second(jnp.tanh(self.first(x))))

    def loss(model: Net, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x).sum(-1) ** 2)

    net = Net()
    for made_at in (256, 8):
        plan = jact.make_plan(jact.nnx.grad(loss, policy="int8"))(net, X[:made_at])
        for size in BATCHES:
            got = jax.tree.leaves(jact.nnx.grad(loss, policy=plan)(net, X[:size]))
            cases.assert_close(got, jax.tree.leaves(nnx.grad(loss)(net, X[:size])), 0.05)


def test_rules_of_a_plan_do_not_warn_where_values_are_small() -> None:
    policy = jact.Policy(rules=[jact.Rule("scan/carry*", "int8")], default="int4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = jact.make_plan(looped, policy)(W, X)
        for size in BATCHES:
            jact.make_plan(looped, plan)(W, X[:size])
