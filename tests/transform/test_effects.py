"""Callbacks, prints, randomness and state: each happens as in the plain function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jact
from tests.transform import cases
from tests.transform.cases import PARAMS, ROWS, WIDTH, X

TRANSFORMS = {
    "grad": lambda f: jax.jit(jact.grad(f, policy="int8")),
    "value_and_grad": lambda f: jax.jit(jact.value_and_grad(f, policy="int4")),
    "compress": lambda f: jax.jit(jax.value_and_grad(jact.compress(f, "int8"))),
    "compress_call": lambda f: jact.compress(f, "int8"),
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@pytest.mark.oldest
@transforms
@pytest.mark.parametrize("kind", ["debug", "ordered_io"])
def test_callbacks_happen_once(transform: Any, kind: str) -> None:
    seen: list[float] = []

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.gelu(x @ p[0])
        total = lax.stop_gradient(h.sum())
        if "io" in kind:
            io_callback(lambda v: seen.append(float(v)), None, total, ordered="ordered" in kind)
        else:
            jax.debug.callback(lambda v: seen.append(float(v)), total, ordered="ordered" in kind)
        return jnp.sum(jax.nn.relu(h @ p[1]) ** 2) / ROWS

    jax.block_until_ready(transform(loss)(PARAMS, X))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [float(jax.nn.gelu(X @ PARAMS[0]).sum())], rtol=1e-5)


def test_callback_without_jit_happens_once() -> None:
    seen: list[float] = []

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p[0]
        jax.debug.callback(lambda v: seen.append(float(v)), h.sum())
        return jnp.sum(h**2)

    jact.grad(loss, policy="int8")(PARAMS, X)
    jax.effects_barrier()
    assert len(seen) == 1


def test_debug_print_once(capfd: pytest.CaptureFixture[str]) -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p[0])
        jax.debug.print("the sum {}", h.sum())
        return jnp.sum(h @ p[1])

    jax.block_until_ready(jax.jit(jact.grad(loss, policy="int8"))(PARAMS, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the sum") == 1


def test_callback_in_a_scan_happens_once_per_step() -> None:
    seen: list[float] = []

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, w: jax.Array) -> Any:
            jax.debug.callback(lambda v: seen.append(float(v)), h.sum())
            return jax.nn.gelu(h @ w), None

        return jnp.sum(lax.scan(step, x, jnp.stack(p))[0] ** 2)

    jax.block_until_ready(jax.jit(jact.grad(loss, policy="int8"))(PARAMS, X))
    jax.effects_barrier()
    assert len(seen) == 2


def test_callback_of_a_backward_rule_happens_once() -> None:
    seen: list[int] = []

    @jax.custom_vjp
    def watched(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, g: jax.Array) -> Any:
        jax.debug.callback(lambda: seen.append(1))
        return (g,)

    watched.defvjp(lambda x: (x, None), backward)
    jax.block_until_ready(
        jax.jit(jact.grad(lambda p: jnp.sum(jnp.tanh(watched(X @ p[0])) ** 2)))(PARAMS)
    )
    jax.effects_barrier()
    assert len(seen) == 1


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_pure_callback_runs_once_on_exact_values(policy: str) -> None:
    seen: list[np.ndarray] = []

    def host(h: Any) -> Any:
        seen.append(np.array(h))
        return np.tanh(np.asarray(h))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p[0]
        scale = jax.pure_callback(
            host, jax.ShapeDtypeStruct(h.shape, h.dtype), lax.stop_gradient(h)
        )
        return jnp.sum(jax.nn.relu(h @ p[1]) * scale) / ROWS

    jax.block_until_ready(jax.jit(jact.value_and_grad(loss, policy=policy))(PARAMS, X))
    assert len(seen) == 1
    np.testing.assert_allclose(seen[0], X @ PARAMS[0], rtol=1e-5, atol=1e-5)


def _random_answer(shape: tuple[int, ...]) -> jax.Array:
    generator = np.random.default_rng(0)
    return jax.pure_callback(
        lambda: generator.random(shape, np.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
    )


@pytest.mark.parametrize(
    "draw",
    [_random_answer, lambda shape: lax.rng_uniform(jnp.float32(0), jnp.float32(1), shape)],
    ids=["pure_callback", "rng_uniform"],
)
def test_what_cannot_be_repeated_is_not(draw: Any) -> None:
    """The backward pass sees the numbers of the forward pass, not newly drawn ones."""

    def loss(p: Any, x: jax.Array) -> Any:
        scale = draw((ROWS, WIDTH))
        return jnp.sum((x @ p[0]) * scale), scale

    (_, scale), gradient = jax.jit(jact.value_and_grad(loss, has_aux=True, policy="int8"))(
        PARAMS, X
    )
    np.testing.assert_allclose(gradient[0], X.T @ scale, rtol=0.05, atol=0.5)


@pytest.mark.oldest
@pytest.mark.parametrize("key", ["typed", "raw", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("policy", ["int8", "int2"])
def test_dropout_mask_is_the_forward_pass_s(key: str, policy: str) -> None:
    """The gradient of what is masked is zero exactly where the plain gradient is."""
    keys = {"typed": jax.random.key, "raw": jax.random.PRNGKey}
    seed = keys[key](3) if key in keys else jax.random.key(3, impl=key)

    def loss(bias: jax.Array, p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        h = x @ p[0] + bias
        mask = jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.sum(jnp.where(mask, h / 0.7, 0.0) @ p[1] * x)

    bias = jnp.zeros((ROWS, WIDTH))
    got = jax.jit(jact.grad(loss, policy=policy))(bias, PARAMS, X, seed)
    want = jax.jit(jax.grad(loss))(bias, PARAMS, X, seed)
    np.testing.assert_array_equal(np.asarray(got) == 0, np.asarray(want) == 0)
    assert 0.2 < np.mean(np.asarray(want) == 0) < 0.4


def test_dropout_masks_in_a_scan() -> None:
    """Each layer's mask is that of the forward pass, with the key in the carry."""

    def loss(bias: jax.Array, ws: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        def layer(carry: Any, parameters: Any) -> Any:
            (h, key), (w, b) = carry, parameters
            key, sub = jax.random.split(key)
            kept = jax.random.bernoulli(sub, 0.8, h.shape)
            return (jnp.where(kept, jax.nn.relu(h @ w + b), 0.0), key), None

        return jnp.sum(lax.scan(layer, (x, key), (ws, bias))[0][0])

    args = jnp.zeros((3, ROWS, WIDTH)), jnp.stack([*PARAMS, PARAMS[0]]), X, jax.random.key(0)
    got = jax.jit(jact.grad(loss, policy="int2"))(*args)
    want = jax.jit(jax.grad(loss))(*args)
    np.testing.assert_array_equal(np.asarray(got) == 0, np.asarray(want) == 0)
    cases.assert_close(got, want, 1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_references(wrap: Any) -> None:
    """A mutable array that is read, and then written, inside the loss."""

    def loss(p: Any, x: jax.Array, state: Any) -> jax.Array:
        scale = state[...]
        y = jnp.sum(jnp.tanh(x @ p[0]) * scale * jnp.tanh(x @ p[1]))
        state[...] = jnp.zeros_like(scale)
        return y

    def run(grad: Any) -> tuple[Any, jax.Array]:
        state = jax.new_ref(jnp.full((ROWS, WIDTH), 0.5))
        return wrap(grad(loss))(PARAMS, X, state), state[...]

    got, want = run(functools.partial(jact.grad, policy="int8")), run(jax.grad)
    cases.assert_close(got[0], want[0], 0.01)
    cases.assert_equal(got[1], want[1])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_references_made_inside(wrap: Any) -> None:
    """A mutable array of the loss's own, through which its gradient goes."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        state = jax.new_ref(x)

        def step(_: Any, carry: None) -> None:
            state[...] = jnp.tanh(state[...] @ p[0])

        jax.lax.fori_loop(0, 3, step, None)
        return jnp.sum(state[...] ** 2)

    got = wrap(jact.grad(loss, policy="int8"))(PARAMS, X)
    cases.assert_close(got, wrap(jax.grad(loss))(PARAMS, X), 0.02)
