"""Every case of the table under every transformation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jact
from tests.transform import cases
from tests.transform.cases import Case

jact_value_and_grad = functools.partial(jact.value_and_grad, policy="int8")


@cases.parametrize(cases.FUNCTIONS, cases.MODELS)
def test_jit_of_value_and_grad(case: Case) -> None:
    args = case.make()
    want = jax.jit(jax.value_and_grad(case.fun, has_aux=case.has_aux))(*args)
    got = jax.jit(jact_value_and_grad(case.fun, has_aux=case.has_aux))(*args)
    cases.assert_matches(got, want, case.tolerance)


@pytest.mark.oldest
@cases.parametrize(
    {name: cases.FUNCTIONS[name] for name in ("net", "gathered", "dropout", "mixed_precision")}
)
def test_without_jit(case: Case) -> None:
    args = case.make()
    want = jax.value_and_grad(case.fun)(*args)
    got = jact_value_and_grad(case.fun)(*args)
    cases.assert_matches(got, want, case.tolerance, exact=case.fun is cases.dropout)


@cases.parametrize({name: cases.FUNCTIONS[name] for name in ("net", "attention", "convolution")})
def test_grad_of_jit(case: Case) -> None:
    """A nested `jit` is entered: the same values are saved, and the gradient is the same."""
    args = case.make()
    jitted = jax.jit(case.fun)
    cases.assert_equal(
        jax.jit(jact.grad(jitted, policy="int4"))(*args),
        jax.jit(jact.grad(case.fun, policy="int4"))(*args),
    )
    bits = jact.make_plan(case.fun, "int4")(*args).bits
    assert bits
    assert list(jact.make_plan(jitted, "int4")(*args).bits.values()) == list(bits.values())


@pytest.mark.oldest
@cases.parametrize(
    {name: cases.FUNCTIONS[name] for name in ("net", "convolution", "dropout", "gathered")}
)
def test_vmap_of_grad(case: Case) -> None:
    params, x, *rest = case.make()
    batch = jnp.stack([x, x * 0.5])

    def run(value_and_grad: Any) -> Any:
        return jax.jit(jax.vmap(lambda x: value_and_grad(case.fun)(params, x, *rest)))(batch)

    cases.assert_matches(
        run(jact_value_and_grad), run(jax.value_and_grad), case.tolerance, exact=False
    )


def test_vmap_of_grad_over_params_and_keys() -> None:
    params = jax.tree.map(lambda a: jnp.stack([a, a * 2.0]), cases.PARAMS)
    for keys in (jax.random.split(jax.random.key(0)), jax.random.split(jax.random.PRNGKey(0))):
        got = jax.jit(jax.vmap(jact.grad(cases.dropout, policy="int8"), (0, None, 0)))(
            params, cases.X, keys
        )
        want = jax.vmap(jax.grad(cases.dropout), (0, None, 0))(params, cases.X, keys)
        cases.assert_close(got, want, 0.01)


@cases.parametrize(
    {name: cases.FUNCTIONS[name] for name in ("net", "normalised", "convolution", "gathered")}
)
def test_grad_of_vmap(case: Case) -> None:
    params, x, *rest = case.make()

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: case.fun(params, x, *rest))(batch).sum()

    batch = jnp.stack([x, x * 0.5])
    got = jax.jit(jact_value_and_grad(loss))(params, batch)
    cases.assert_matches(
        got, jax.jit(jax.value_and_grad(loss))(params, batch), case.tolerance, exact=False
    )


@cases.parametrize(
    {name: cases.FUNCTIONS[name] for name in ("net", "dropout_old_key")}
    | {"mlp": cases.MODELS["mlp"]}
)
def test_training_in_a_scan(case: Case) -> None:
    """Steps of gradient descent inside `lax.scan`."""
    params, *rest = case.make()

    def train(value_and_grad: Any) -> Any:
        def step(params: Any, _: None) -> Any:
            value, grads = value_and_grad(case.fun, has_aux=case.has_aux)(params, *rest)
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value

        return jax.jit(lambda params: lax.scan(step, params, None, length=3))(params)

    (params_got, values_got), (params_want, values_want) = (
        train(jact_value_and_grad),
        train(jax.value_and_grad),
    )
    cases.assert_close(params_got, params_want, 0.002)
    cases.assert_close(values_got, values_want, 0.01)


def test_loss_scaling() -> None:
    """float16 with a scaled loss, as mixed-precision training has it: the scale drops out."""
    half = jax.tree.map(lambda p: p.astype(jnp.float16), cases.PARAMS)
    x, scale = cases.X.astype(jnp.float16), jnp.float32(1024)

    def scaled(params: Any) -> jax.Array:
        return cases.half_net(params, x) * scale

    value, grads = jax.jit(jact_value_and_grad(scaled))(half)
    unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
    want = jax.jit(jax.value_and_grad(lambda p: cases.net_in_float32(p, cases.X)))(cases.PARAMS)
    cases.assert_close((value / scale, unscaled), want, 0.02)


def test_accumulated_micro_batches_in_a_scan() -> None:
    batches = cases.X.reshape(2, cases.ROWS // 2, cases.WIDTH)

    def accumulate(grad: Any) -> Any:
        def step(total: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, grad(cases.net)(cases.PARAMS, x)), None

        return jax.jit(
            lambda: lax.scan(step, jax.tree.map(jnp.zeros_like, cases.PARAMS), batches)[0]
        )()

    cases.assert_close(
        accumulate(functools.partial(jact.grad, policy="int8")), accumulate(jax.grad), 0.01
    )


@cases.parametrize({name: cases.FUNCTIONS[name] for name in ("net", "attention")})
def test_inside_and_around_checkpoint(case: Case) -> None:
    args = case.make()
    want = jax.jit(jax.grad(case.fun))(*args)
    remat = jax.checkpoint(case.fun)
    cases.assert_close(jax.jit(jact.grad(remat, policy="int8"))(*args), want, case.tolerance)
    compressed = jax.checkpoint(lambda *args: jact.compress(case.fun, "int8")(*args))
    cases.assert_close(jax.jit(jax.grad(compressed))(*args), want, case.tolerance)


@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_checkpoint_with_a_policy(policy: str) -> None:
    remat = jax.checkpoint(cases.net, policy=getattr(jax.checkpoint_policies, policy))
    want = jax.jit(jax.value_and_grad(cases.net))(cases.PARAMS, cases.X)
    got = jax.jit(jact_value_and_grad(remat))(cases.PARAMS, cases.X)
    cases.assert_matches(got, want, 0.01, exact=False)


@cases.parametrize({name: cases.FUNCTIONS[name] for name in ("net", "convolution", "float16")})
def test_compress_of_the_whole(case: Case) -> None:
    """`jact.compress` under `jax.value_and_grad`, by kept and by encoded arguments."""
    args = case.make()
    got = jax.jit(jax.value_and_grad(jact.compress(case.fun, "int8"), (0, 1)))(*args)
    want = jax.jit(jax.value_and_grad(case.fun, (0, 1)))(*args)
    cases.assert_matches(got, want, 2 * case.tolerance)


@cases.parametrize(cases.FUNCTIONS)
def test_off_is_plain(case: Case) -> None:
    args = case.make()
    got = jax.make_jaxpr(jact.value_and_grad(case.fun, policy="off"))(*args)
    assert str(got) == str(jax.make_jaxpr(jax.value_and_grad(case.fun))(*args))
