"""`jact.compress` where it is used: inside other transformations, and inside itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jact
from tests.transform import cases
from tests.transform.cases import PARAMS, V, W, X, layer, net

compressed = jact.compress(layer, "int8")


def both(build: Any) -> tuple[Any, Any]:
    """Values and gradients of `build(layer)` for the compressed and for the plain layer."""
    results = [
        jax.jit(jax.value_and_grad(build(f), (0, 1)))(PARAMS, X) for f in (compressed, layer)
    ]
    return results[0], results[1]


def stack(layer: Any) -> Any:
    return lambda params, x: jnp.sum(layer(params[1], layer(params[0], x)) ** 2) / cases.ROWS


@pytest.mark.oldest
def test_layers_of_a_loss() -> None:
    cases.assert_matches(*both(stack), 0.01)


def test_without_jit() -> None:
    got = jax.value_and_grad(stack(compressed))(PARAMS, X)
    cases.assert_matches(got, jax.value_and_grad(stack(layer))(PARAMS, X), 0.01, exact=False)


@pytest.mark.oldest
def test_body_of_a_scan() -> None:
    def build(layer: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            out, _ = lax.scan(lambda h, w: (layer(w, h), None), x, jnp.stack([*params, params[0]]))
            return jnp.sum(out**2) / cases.ROWS

        return loss

    cases.assert_matches(*both(build), 0.01)
    # And that inside jact's own gradient.
    got = jax.jit(jact.value_and_grad(build(compressed), (0, 1), policy="int8"))(PARAMS, X)
    cases.assert_matches(got, jax.jit(jax.value_and_grad(build(layer), (0, 1)))(PARAMS, X), 0.02)


def test_under_vmap() -> None:
    def build(layer: Any) -> Any:
        return lambda params, x: jax.vmap(stack(layer), (None, 0))(
            params, x.reshape(2, -1, cases.WIDTH)
        ).sum()

    cases.assert_matches(*both(build), 0.01, exact=False)


@pytest.mark.oldest
def test_compress_inside_compress() -> None:
    cases.assert_matches(*both(lambda layer: jact.compress(stack(layer), "int8")), 0.02)


@pytest.mark.parametrize("group_size", [64, 4])
def test_compress_inside_value_and_grad(group_size: int) -> None:
    """The inner function's codes decode with the ranges that they were made with."""
    policy = jact.Policy(default=jact.codecs.Quantize(bits=8, group_size=group_size))
    inner = stack(jact.compress(layer, policy))
    got = jax.jit(jact.value_and_grad(inner, (0, 1), policy="int8"))(PARAMS, X)
    cases.assert_matches(got, jax.jit(jax.value_and_grad(stack(layer), (0, 1)))(PARAMS, X), 0.02)


@pytest.mark.parametrize("grad", [jax.grad, jact.grad])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_layer_traced_once_and_differentiated_in_different_arguments(grad: Any, wrap: Any) -> None:
    """JAX traces the wrapped layer once, and its gradients read that trace again."""
    shared = wrap(lambda w, x: jact.compress(layer, "int8")(w, x) * 2.0)
    want = jax.grad(lambda w, x: layer(w, x).sum() * 2.0, (0, 1))(W, X)
    for argnums in (0, (0, 1), 0, 1, (0, 1)):
        got = grad(lambda w, x: shared(w, x).sum(), argnums)(W, X)
        expected = want[argnums] if isinstance(argnums, int) else want
        cases.assert_close(got, expected, 0.01)


def test_compress_inside_jit_inside_checkpoint() -> None:
    cases.assert_matches(
        *both(lambda layer: jax.checkpoint(jax.jit(stack(layer)))), 0.02, exact=False
    )


def test_two_models_in_one_loss() -> None:
    first, second = jact.compress(net, "int8"), jact.compress(net, "int8")

    def build(first: Any, second: Any) -> Any:
        return lambda a, b: first(a, X) * 2.0 + second(b, X) ** 2

    want = jax.jit(jax.value_and_grad(build(net, net), (0, 1)))(PARAMS, (V, W))
    for transform in (jax.value_and_grad, functools.partial(jact.value_and_grad, policy="int8")):
        got = jax.jit(transform(build(first, second), (0, 1)))(PARAMS, (V, W))
        cases.assert_matches(got, want, 0.02, exact=False)


@pytest.mark.parametrize("player", [0, 1])
def test_adversarial_networks(player: int) -> None:
    def generator(g: Any, z: jax.Array) -> jax.Array:
        return jnp.tanh(layer(g[0], z) @ g[1])

    def critic(d: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(layer(d[0], x) @ d[1])

    def loss(g: Any, d: Any) -> jax.Array:
        fake = critic(d, generator(g, X))
        return (-fake, fake - critic(d, X))[player]

    got = jax.jit(jact.value_and_grad(loss, player, policy="int8"))(PARAMS, (V, W))
    want = jax.jit(jax.value_and_grad(loss, player))(PARAMS, (V, W))
    cases.assert_matches(got, want, 0.02, exact=False)


def test_shared_layer() -> None:
    cases.assert_matches(
        *both(lambda layer: lambda p, x: jnp.sum(layer(p[0], layer(p[0], x))) + jnp.sum(p[1])), 0.01
    )


def test_decorators() -> None:
    @jact.compress(policy="int8")
    def with_arguments(w: jax.Array, x: jax.Array) -> jax.Array:
        """Says what it does."""
        return layer(w, x)

    @jact.compress
    def without(w: jax.Array, x: jax.Array) -> jax.Array:
        return layer(w, x)

    assert (
        with_arguments.__name__ == "with_arguments"
        and with_arguments.__doc__ == "Says what it does."
    )
    want = jax.grad(lambda w: layer(w, X).sum())(W)
    cases.assert_close(jax.jit(jax.grad(lambda w: with_arguments(w, X).sum()))(W), want, 0.01)
    cases.assert_close(jax.jit(jax.grad(lambda w: without(w, X).sum()))(W), want, 0.1)


class Model:
    def __init__(self, w: Any):
        self.w = w

    @jact.compress(policy="int8", keep=(1,))
    def method(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return layer(w, x)

    @jact.compress(policy="int8")
    def bound_weights(self, x: jax.Array) -> jax.Array:
        return layer(self.w, x)

    @classmethod
    @jact.compress(policy="int8", keep=(1,))
    def class_method(cls, w: jax.Array, x: jax.Array) -> jax.Array:
        return layer(w, x)

    @staticmethod
    @jact.compress(policy="int8")
    def static_method(w: jax.Array, x: jax.Array) -> jax.Array:
        return layer(w, x)


@pytest.mark.parametrize("name", ["method", "class_method", "static_method", "bound_weights"])
def test_methods(name: str) -> None:
    def loss(w: jax.Array) -> jax.Array:
        call = getattr(Model(w), name)
        return (call(X) if name == "bound_weights" else call(w, X)).sum()

    cases.assert_close(jax.jit(jax.grad(loss))(W), jax.grad(lambda w: layer(w, X).sum())(W), 0.01)


def test_plan_of_a_method() -> None:
    """A bound method still is the compressed function, with its own policy and kept arguments."""
    plan = jact.make_plan(Model(W).method)(W, X)
    assert set(plan.bits.values()) == {"int8"} and len(plan.bits) == 2


@pytest.mark.parametrize("keep", [(0, "v"), ("w", "v")], ids=repr)
def test_keep_names_arguments(keep: Any) -> None:
    """A parameter is kept whether it is passed by position or by name."""

    @jact.compress(policy="int4", keep=keep)
    def loss(w: jax.Array, *, x: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) @ v)

    _, pull = jax.vjp(lambda w, v, x: loss(w, x=x, v=v), W, V, X)
    kept = [a for a in jax.tree.leaves(pull) if a.shape == W.shape]
    assert [a.dtype for a in kept] == [jnp.float32] * 2


@pytest.mark.parametrize("keep", [(7,), ("nothing",)])
def test_keep_that_names_no_argument(keep: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="keep"):
        jact.compress(layer, "int4", keep=keep)(W, X)


def test_outputs_of_any_kind() -> None:
    def outputs(w: jax.Array, x: jax.Array) -> Any:
        return {
            "y": x @ w,
            "x": x,
            "name": "a",
            "none": None,
            "count": 3,
            "rate": 2.5,
            "flag": True,
            "n": jnp.arange(3),
        }

    got, want = jact.compress(outputs, "int8")(W, X), outputs(W, X)
    for name in ("name", "none", "count", "rate", "flag"):
        assert got[name] == want[name] and type(got[name]) is type(want[name])
    gradient = jax.jit(jax.grad(lambda w: jact.compress(outputs, "int8")(w, X)["y"].sum()))(W)
    # Of normal values in groups of 64, the sum of those decoded is expected to err by 0.0096.
    cases.assert_close(gradient, jax.grad(lambda w: (X @ w).sum())(W), 0.02)


def test_python_numbers_of_outputs_stay_usable() -> None:
    """A flag that a layer returns may be branched on under `jit`, as it may without jact."""

    def loss(w: jax.Array) -> jax.Array:
        y, flag, count = jact.compress(lambda w, x: (x @ w, True, 2), "int8")(w, X)
        return sum(y[i].sum() for i in range(count)) if flag else jnp.float32(0.0)

    cases.assert_close(jax.jit(jax.grad(loss))(W), jax.grad(lambda w: (X[:2] @ w).sum())(W), 0.01)


@pytest.mark.oldest
def test_vjp_without_jit() -> None:
    y, pull = jax.vjp(jact.compress(layer, "int8"), W, X)
    want_y, want_pull = jax.vjp(layer, W, X)
    cases.assert_close(y, want_y, 1e-6)
    cases.assert_close(pull(y), want_pull(y), 0.01)
    cases.assert_equal(pull(y), pull(y))


def test_plain_call_is_plain() -> None:
    cases.assert_equal(jax.jit(compressed)(W, X), jax.jit(layer)(W, X))
    cases.assert_equal(
        jax.vmap(compressed, (None, 0))(W, X[None]), jax.vmap(layer, (None, 0))(W, X[None])
    )


def test_no_tracer_leaks() -> None:
    with jax.checking_leaks():
        jax.jit(jact.grad(net))(PARAMS, X)
        jax.jit(jax.grad(stack(jact.compress(layer))))(PARAMS, X)


def test_disable_jit() -> None:
    with jax.disable_jit():
        got = jact.grad(net, policy="int8")(PARAMS, X)
    cases.assert_close(got, jax.grad(net)(PARAMS, X), 0.01)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans(wrap: Any) -> None:
    """Finite arrays make no NaN on the way, with which JAX's check would stop."""
    with jax.debug_nans(True):
        wrap(jact.grad(net, policy="int8"))(PARAMS, X)
