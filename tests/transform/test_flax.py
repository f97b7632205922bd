"""Flax models in functional form: state and random numbers are those of the plain function."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jact
from tests.transform import cases
from tests.transform.cases import X


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(256)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "mean", x.mean())
        return nn.Dense(64)(x)


@pytest.mark.parametrize(
    ("make_key", "train"), [(jax.random.key, True), (jax.random.PRNGKey, False)]
)
def test_linen(make_key: Any, train: bool) -> None:
    model = LinenModel()
    variables = model.init(jax.random.key(0), X, train=False)

    def loss(params: Any, stats: Any, key: jax.Array, train: bool) -> Any:
        y, new = model.apply(
            {"params": params, "batch_stats": stats},
            X,
            train=train,
            rngs={"dropout": key},
            mutable=["batch_stats", "intermediates"],
        )
        return jnp.mean(y**2), new

    def run(transform: Any) -> Any:
        call = jax.jit(lambda *args: transform(loss, has_aux=True)(*args, train))
        return call(variables["params"], variables["batch_stats"], make_key(1))

    got = run(lambda f, **options: jact.value_and_grad(f, policy="int8", **options))
    cases.assert_matches(got, run(jax.value_and_grad), 0.01)


def test_linen_apply_compressed() -> None:
    model = nn.Dense(256)
    variables = model.init(jax.random.key(0), X)
    compressed = jact.compress(model.apply, "int8")
    got = jax.jit(jax.grad(lambda v: jnp.sum(jnp.tanh(compressed(v, X)))))(variables)
    cases.assert_close(
        got, jax.grad(lambda v: jnp.sum(jnp.tanh(model.apply(v, X))))(variables), 0.01
    )


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def test_nnx_split_and_merge() -> None:
    definition, params, rest = nnx.split(NNXModel(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: jax.Array) -> Any:
        model = nnx.merge(definition, params, rest, copy=True)
        return jnp.mean(model(x) ** 2), nnx.state(model, nnx.Not(nnx.Param))

    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, rest, X)
    got = jax.jit(jact.value_and_grad(loss, has_aux=True, policy="int8"))(params, rest, X)
    cases.assert_matches(got, want, 0.01)
    assert len(jact.make_plan(loss, "int4", has_aux=True)(params, rest, X).bits) == 2


def test_nnx_module_as_a_pytree() -> None:
    model = nnx.Linear(64, 256, rngs=nnx.Rngs(0))

    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(model(x)) ** 2)

    got, want = jax.jit(jact.grad(loss, policy="int8"))(model, X), jax.jit(jax.grad(loss))(model, X)
    cases.assert_close(got, want, 0.01)


def test_nnx_state_is_not_lost_in_silence() -> None:
    """A module that is an argument may be read, but what is written to its copy would be lost."""
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    x = jnp.ones((32, 8))

    def loss(model: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x) ** 2)

    with pytest.raises(ValueError, match="jact.nnx.value_and_grad"):
        jact.value_and_grad(loss)(model, x)
    model.eval()
    assert jact.value_and_grad(loss)(model, x)[0].shape == ()
