"""Gradients on several devices: shardings and communication are those of the plain program."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jact
from tests.transform import cases
from tests.transform.cases import PARAMS, X, net

value_and_grad = functools.partial(jact.value_and_grad, policy="int8")
COLLECTIVE = re.compile(
    r"= (.*) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def collectives(fun: Any, *args: Any) -> dict[tuple[str, str], int]:
    """How often each type of array is communicated; XLA may send several at once."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    return dict(
        collections.Counter(
            (kind, array)
            for result, kind in COLLECTIVE.findall(text)
            for array in re.findall(r"\w+\[[\d,]*\]", result)
        )
    )


LAYOUTS = {
    "data": (P(), P("d")),
    "rows": (P("d"), P()),
    "fsdp": (P("d"), P("d")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_automatic_axes(layout: str) -> None:
    specs = [NamedSharding(mesh(), spec) for spec in LAYOUTS[layout]]
    args = jax.device_put(PARAMS, specs[0]), jax.device_put(X, specs[1])
    got, want = jax.jit(value_and_grad(net))(*args), jax.jit(jax.value_and_grad(net))(*args)
    cases.assert_matches(got, want, 0.01, exact=False)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    if layout == "data":
        plain = collectives(jax.value_and_grad(net), *args)
        assert plain
        assert collectives(value_and_grad(net), *args) == plain


def test_explicit_axes() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        args = jax.device_put(PARAMS, P()), jax.device_put(X, P("d"))
        want = jax.jit(jax.value_and_grad(net))(*args)
        got = jax.jit(value_and_grad(net))(*args)
        cases.assert_matches(got, want, 0.01, exact=False)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert jax.typeof(a) == jax.typeof(b)


def test_constraints_inside() -> None:
    where = NamedSharding(mesh(), P("d"))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = lax.with_sharding_constraint(jax.nn.gelu(x @ params[0]), where)
        return jnp.sum(jnp.tanh(h @ params[1])) / cases.ROWS

    want = jax.jit(jax.value_and_grad(loss))(PARAMS, X)
    cases.assert_matches(jax.jit(value_and_grad(loss))(PARAMS, X), want, 0.01, exact=False)


def test_inside_shard_map() -> None:
    def run(grad: Any) -> Any:
        def local(params: Any, x: jax.Array) -> Any:
            return jax.tree.map(lambda g: lax.pmean(g, "d"), grad(net)(params, x))

        mapped = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
        return jax.jit(mapped)(PARAMS, jnp.tile(X, (8, 1)))

    cases.assert_close(run(functools.partial(jact.grad, policy="int8")), run(jax.grad), 0.01)


def test_around_shard_map() -> None:
    def local(params: Any, x: jax.Array) -> jax.Array:
        return lax.pmean(net(params, x), "d")

    loss = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
    args = PARAMS, jnp.tile(X, (8, 1))
    want = jax.jit(jax.value_and_grad(loss))(*args)
    cases.assert_matches(jax.jit(value_and_grad(loss))(*args), want, 0.01, exact=False)


def test_named_axis_of_vmap() -> None:
    """A loss that communicates, as BatchNorm does, under `vmap` with a name."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params[0]
        return jnp.sum(jnp.tanh(h - lax.pmean(h, "d")) ** 2) / cases.ROWS

    batch = jnp.stack([X, X[::-1] * 2.0])

    def run(grad: Any) -> Any:
        return jax.jit(jax.vmap(grad(loss), (None, 0), axis_name="d"))(PARAMS, batch)

    cases.assert_close(run(functools.partial(jact.grad, policy="int8")), run(jax.grad), 0.02)


def test_automatic_axes_inside_explicit_ones() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        args = jax.device_put(PARAMS, P()), jax.device_put(X, P("d"))

        def loss(params: Any, x: jax.Array) -> jax.Array:
            @functools.partial(jax.sharding.auto_axes, out_sharding=P("d"))
            def layer(w: jax.Array, x: jax.Array) -> jax.Array:
                return jnp.tanh(x @ w)

            return jnp.sum(layer(params[1], layer(params[0], x)) ** 2) / cases.ROWS

        want = jax.jit(jax.value_and_grad(loss))(*args)
        cases.assert_matches(jax.jit(value_and_grad(loss))(*args), want, 0.01, exact=False)
