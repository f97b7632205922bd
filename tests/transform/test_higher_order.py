"""Second derivatives, and forward mode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jact
from tests.transform import cases
from tests.transform.cases import PARAMS, W, X, net

DIRECTION = jax.tree.map(lambda a: a * 0.3 + 0.01, PARAMS)


def plain_grad(fun: Any) -> Any:
    return jax.grad(fun)


def jact_grad(fun: Any) -> Any:
    return jact.grad(fun, policy="int8")


def jact_value_and_grad(fun: Any) -> Any:
    return lambda *args: jact.value_and_grad(fun, policy="int8")(*args)[1]


def product(grad: Any, outer: Any = jax.grad) -> Any:
    """The product of the Hessian and `DIRECTION`, by two gradients."""

    def along(params: Any) -> jax.Array:
        return sum(map(jnp.vdot, grad(lambda p: net(p, X))(params), DIRECTION))

    return jax.jit(outer(along))(PARAMS)


@pytest.mark.oldest
@pytest.mark.parametrize("grad", [jact_grad, jact_value_and_grad])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_reverse_over_reverse(grad: Any, dtype: Any) -> None:
    """Second derivatives are the plain function's."""
    with jax.enable_x64(dtype is jnp.float64):
        params, direction, x = jax.tree.map(lambda a: a.astype(dtype), (PARAMS, DIRECTION, X))

        def hvp(grad: Any) -> Any:
            return jax.jit(
                jax.grad(lambda p: sum(map(jnp.vdot, grad(lambda p: net(p, x))(p), direction)))
            )(params)

        cases.assert_close(hvp(grad), hvp(plain_grad), 1e-5 if dtype is jnp.float32 else 1e-12)


def test_forward_over_reverse() -> None:
    def hvp(grad: Any) -> Any:
        return jax.jit(lambda p: jax.jvp(grad(lambda p: net(p, X)), (p,), (DIRECTION,))[1])(PARAMS)

    cases.assert_close(hvp(jact_grad), hvp(plain_grad), 1e-5)


def test_jact_over_jact() -> None:
    cases.assert_close(product(jact_grad, jact_grad), product(plain_grad), 0.05)


def test_hessian() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(X[:, :8] @ w) ** 2)

    w = W[:8, :3]
    cases.assert_close(jax.jit(jax.jacfwd(jact.grad(loss)))(w), jax.jit(jax.hessian(loss))(w), 1e-5)


def test_gradient_penalty() -> None:
    """A loss with a gradient in it, as a Wasserstein critic's."""

    def loss(grad: Any, params: Any, x: jax.Array) -> jax.Array:
        slopes = jax.vmap(grad(lambda x: net(params, x[None])))(x)
        return jnp.mean((jnp.linalg.norm(slopes, axis=-1) * cases.ROWS - 1.0) ** 2)

    want = jax.jit(jax.grad(functools.partial(loss, plain_grad)))(PARAMS, X)
    cases.assert_close(jax.jit(jax.grad(functools.partial(loss, jact_grad)))(PARAMS, X), want, 1e-4)
    cases.assert_close(
        jax.jit(jact_grad(functools.partial(loss, plain_grad)))(PARAMS, X), want, 0.03
    )


@pytest.mark.oldest
def test_compress_with_encoded_arguments_says_no() -> None:
    loss = jact.compress(net, "int8")
    with pytest.raises(NotImplementedError, match=r"jact\.compress\(net\).*keep="):
        jax.grad(lambda p: jax.grad(lambda p: loss(p, X))(p)[0].sum())(PARAMS)


def test_compress_that_keeps_all_arguments() -> None:
    loss = jact.compress(net, "int8", keep=(0, 1))

    def twice(loss: Any) -> Any:
        return jax.jit(jax.grad(lambda p: jax.grad(lambda p: loss(p, X))(p)[0].sum()))(PARAMS)

    cases.assert_close(twice(loss), twice(net), 1e-5)


@pytest.mark.oldest
@pytest.mark.parametrize("how", ["jvp", "jacfwd", "linearize"])
def test_forward_mode_says_no(how: str) -> None:
    """The message names jact and the way out."""

    def loss(params: Any) -> jax.Array:
        return jact.compress(net, "int8")(params, X)

    calls = {
        "jvp": lambda: jax.jvp(loss, (PARAMS,), (PARAMS,)),
        "jacfwd": lambda: jax.jacfwd(loss)(PARAMS),
        "linearize": lambda: jax.linearize(loss, PARAMS)[1](PARAMS),
    }
    # What `jax.linearize` returns is called out of jact's sight.
    with pytest.raises(TypeError, match="forward-mode" if how == "linearize" else "jact"):
        calls[how]()


def test_forward_mode_inside() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        _, tangent = jax.jvp(lambda x: jax.nn.gelu(x @ params[0]) @ params[1], (x,), (x,))
        return jnp.sum(tangent**2) / cases.ROWS

    want = jax.jit(jax.value_and_grad(loss))(PARAMS, X)
    got = jax.jit(jact.value_and_grad(loss, policy="int8"))(PARAMS, X)
    cases.assert_matches(got, want, 0.01, exact=False)


@pytest.mark.parametrize("how", ["product", "through_a_sine", "hessian"])
def test_no_second_derivative_is_lost_in_codes(how: str) -> None:
    """With respect to an encoded input, all that the gradient depends on are codes."""
    w = cases.normal(7, 16, 16)
    x = cases.normal(8, 4, 16)

    def part(x: jax.Array) -> jax.Array:
        return jact.compress(lambda w, x: jnp.tanh(x @ w).sum())(w, x)

    second = {
        "product": lambda: jax.jvp(jax.grad(part), (x,), (x,)),
        "through_a_sine": lambda: jax.grad(
            lambda x: jnp.sum(jax.grad(lambda y: part(jnp.sin(y)))(x) ** 2)
        )(x),
        "hessian": lambda: jax.hessian(part)(x),
    }
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        second[how]()
