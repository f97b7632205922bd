"""Branches, mapped regions and loops: what their bodies save, and what they are told of inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jact
from tests.transform import cases

LAYERS, ROWS, WIDTH = 4, 256, 128
X = cases.normal(0, ROWS, WIDTH)
W = cases.normal(1, LAYERS, WIDTH, WIDTH, scale=WIDTH**-0.5)
POLICY = jact.Policy(default="int8", min_bytes=1024)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.nn.relu(x @ w) @ w.T


def branched(w: jax.Array, x: jax.Array, flag: jax.Array) -> jax.Array:
    for u in w:
        x = lax.cond(flag > 0, lambda h, u=u: layer(u, h), lambda h, u=u: jnp.tanh(h @ u), x)
    return jnp.mean(x**2)


def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        for u in w:
            x = layer(u, x)
        return lax.pmean(jnp.mean(x**2), "d")

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)


@pytest.mark.oldest
@pytest.mark.parametrize("flag", [0, 1])
def test_branches(flag: int) -> None:
    args = W, X, jnp.int32(flag)
    want = jax.jit(jax.value_and_grad(branched))(*args)
    got = jax.jit(jact.value_and_grad(branched, policy=POLICY))(*args)
    assert got[0] == want[0]
    cases.assert_close(got[1], want[1], 0.01)


@pytest.mark.parametrize("fun", [branched, mapped], ids=["branches", "shard_map"])
def test_plans_reports_and_memory_reach_inside(fun: Callable[..., Any]) -> None:
    args = (W, X, jnp.int32(1)) if fun is branched else (W, jnp.tile(X, (8, 1)))
    place = "cond/branch_1/" if fun is branched else "shard_map/"
    plan = jact.make_plan(fun, POLICY)(*args)
    inside = [name for name in plan.bits if name.startswith(place)]
    assert any("dot_general" in name for name in inside)
    coarse = plan.replace(dict.fromkeys(inside, "int2"))
    rows = {row.name: row for row in jact.report(fun, coarse)(*args).rows}
    assert {rows[name].codec for name in inside} == {"int2"}
    # On a mesh, the parts of all devices together.
    assert {rows[name].bytes for name in inside} == {args[1].size * 4}
    masks = [row for row in rows.values() if row.codec == "mask"]
    assert len(masks) == LAYERS and all(row.exact for row in masks)
    peaks = [
        jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for f in (jax.value_and_grad(fun), jact.value_and_grad(fun, policy=POLICY))
    ]
    assert peaks[1] < 0.65 * peaks[0]


def kinks(h: jax.Array) -> jax.Array:
    """Its derivative is 1 or 0: any mask that differs from the forward pass's shows at once."""
    return jnp.sum(jax.nn.relu(h))


def in_branch(h: jax.Array) -> jax.Array:
    return lax.cond(h[0, 0] > 99.0, jnp.sum, kinks, h)


def in_loop_over_slices(h: jax.Array) -> jax.Array:
    slices = h.reshape(4, -1, WIDTH)
    return lax.scan(lambda total, rows: (total + kinks(rows), None), jnp.zeros(()), slices)[0]


def in_loop_that_closes_over(h: jax.Array) -> jax.Array:
    return lax.scan(lambda total, _: (total + kinks(h), None), jnp.zeros(()), None, length=2)[0]


def in_branch_of_a_loop(h: jax.Array) -> jax.Array:
    def step(carry: jax.Array, rows: jax.Array) -> Any:
        return lax.cond(carry > -1.0, lambda c: c + kinks(rows + 0.1), lambda c: c, carry), None

    return lax.scan(step, jnp.zeros(()), h.reshape(4, -1, WIDTH))[0]


@pytest.mark.parametrize("policy", ["int1", "int2"])
@pytest.mark.parametrize(
    "fun", [in_branch, in_loop_over_slices, in_loop_that_closes_over, in_branch_of_a_loop]
)
def test_masks_of_what_comes_in_from_outside_are_exact(
    fun: Callable[..., Any], policy: str
) -> None:
    """What a body reads is saved by the function around it, coarsely here; its masks are not."""

    def loss(bias: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w + bias
        return fun(h) + jnp.sum(jnp.sin(h) * 0.0)

    args = jnp.zeros((ROWS, WIDTH)), W[0], X
    rule = jact.Policy(default=policy, min_bytes=1024)
    got, want = jax.jit(jact.grad(loss, policy=rule))(*args), jax.jit(jax.grad(loss))(*args)
    np.testing.assert_array_equal(got, want)


@pytest.mark.oldest
def test_gradients_of_unwanted_weights_are_not_prepared_for() -> None:
    """Frozen weights in a loop: what only their gradient would need is not saved."""

    def loss(bias: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, u: Any) -> Any:
            return h @ u[0] + u[1][None], None

        return jnp.mean(lax.scan(step, x, (w, bias))[0] ** 2)

    bias = jnp.zeros((LAYERS, WIDTH))
    names = jact.make_plan(loss, POLICY)(bias, W, X).bits
    assert not [name for name in names if name.startswith("scan/")]
    trained = jact.make_plan(loss, POLICY, argnums=(0, 1))(bias, W, X).bits
    assert [name for name in trained if name.startswith("scan/")]


def test_merged_weights_in_a_loop_stay_exact() -> None:
    """What a product makes of weights alone (LoRA) is as exact in a loop as outside."""

    def loss(low: Any, w: jax.Array, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, u: Any) -> Any:
            frozen, (a, b) = u
            return jnp.tanh(h @ (frozen + a @ b)), None

        return jnp.mean(lax.scan(step, x, (w, low))[0] ** 2)

    low = cases.normal(2, LAYERS, WIDTH, 64), cases.normal(3, LAYERS, 64, WIDTH)
    report = jact.report(loss, POLICY)(low, W, X)
    weights = [row for row in report.rows if row.shape[-2:] == (WIDTH, WIDTH)]
    assert all(row.exact for row in weights)


def test_statistics_of_what_a_loop_reads_stay_exact() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w[0]).reshape(4, -1, WIDTH)

        def step(total: jax.Array, rows: jax.Array) -> Any:
            centred = rows - rows.mean(-1, keepdims=True)
            scale = lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            return total + jnp.sum(jnp.sin(centred * scale)), None

        return lax.scan(step, jnp.zeros(()), h)[0]

    policy = jact.Policy(default="int2", min_bytes=64, derivatives=False)
    rows = {row.name: row for row in jact.report(loss, policy)(W, X).rows}
    statistics = [row for name, row in rows.items() if name.startswith("scan/")]
    assert statistics and all(row.exact for row in statistics)
    np.testing.assert_array_less(
        [row.bytes for row in statistics], [X.nbytes // 8] * len(statistics)
    )
