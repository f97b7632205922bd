"""Modules that are plain pytrees: of a registered dataclass, and of equinox."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jact
from tests.flax import checks
from tests.flax.checks import HIDDEN, WIDTH, X


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["first", "last"], meta_fields=["act"]
)
@dataclasses.dataclass
class Perceptron:
    first: jax.Array
    last: jax.Array
    act: str

    def __call__(self, x: jax.Array) -> jax.Array:
        return getattr(jax.nn, self.act)(x @ self.first) @ self.last

    @jact.compress(policy="int8")
    def compressed(self, x: jax.Array) -> jax.Array:
        return self(x)


def make() -> Perceptron:
    keys = jax.random.split(jax.random.key(0))
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return Perceptron(
        *(0.1 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)), act="gelu"
    )


def gradient(call: Any, transform: Any = jax.value_and_grad) -> Any:
    return transform(lambda model, x: jnp.mean(jnp.tanh(call(model, x)) ** 2))


FORMS: dict[str, Any] = {
    "function": jact.compress(lambda model, x: model(x), "int8"),
    "unbound method": jact.compress(Perceptron.__call__, "int8"),
    "decorated method": Perceptron.compressed,
    "bound method": lambda model, x: jact.compress(model.__call__, "int8")(x),
    "instance": lambda model, x: jact.compress(model, "int8")(x),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_registered_dataclass(form: Any) -> None:
    model = make()
    got, want = gradient(form)(model, X), gradient(Perceptron.__call__)(model, X)
    checks.assert_close(got, want, checks.TOLERANCE)
    assert isinstance(got[1], Perceptron)
    assert len(checks.codes(gradient(form), model, X)) > 0


def test_a_registered_dataclass_in_a_loss() -> None:
    model = make()
    int8 = functools.partial(jact.value_and_grad, policy="int8")
    got = jax.jit(gradient(Perceptron.__call__, int8))(model, X)
    checks.assert_close(got, gradient(Perceptron.__call__)(model, X), checks.TOLERANCE)


def test_equinox() -> None:
    """Equinox modules, with their filtered gradient and static leaves such as functions."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, depth=2, key=jax.random.key(0))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def plain(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    @jact.compress(policy="int8")
    def block(model: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def compressed(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(block(model, x) ** 2)

    want = plain(model, X)
    checks.assert_close(compressed(model, X), want, checks.TOLERANCE)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    got = jax.jit(jact.value_and_grad(loss, policy="int8"))(arrays, X)
    checks.assert_close(jax.tree.leaves(got), jax.tree.leaves(want), checks.TOLERANCE)
