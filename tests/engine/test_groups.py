"""Along which axis the engine has values be quantised."""

import jax
import jax.numpy as jnp
import pytest

import jact


def batch_norm(x):
    axes = tuple(range(x.ndim - 1))
    centred = x - jnp.mean(x, axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axes, keepdims=True) + 1e-5)


def fast_batch_norm(x):
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) - mean * mean + 1e-5)


def problem(shape, norm):
    """A normalised layer whose channels lie far apart, and its weights and data."""
    keys = jax.random.split(jax.random.key(0), 4)
    channels = shape[-1]
    w = jax.random.normal(keys[0], (channels, 64)) / channels**0.5
    v = jax.random.normal(keys[1], (64, 8)) / 8
    centres = 3 * jax.random.normal(keys[3], (*[1] * (len(shape) - 1), channels))
    x = centres + jax.random.normal(keys[2], shape)

    def loss(params):
        hidden = jax.nn.relu(norm(x @ params[0]))
        return jnp.mean(jnp.tanh(hidden @ params[1]) ** 2)

    return loss, (w, v)


def error(loss, params, policy):
    exact = jnp.concatenate([g.ravel() for g in jax.grad(loss)(params)])
    inexact = jnp.concatenate([g.ravel() for g in jact.grad(loss, policy=policy)(params)])
    return float(jnp.linalg.norm(inexact - exact) / jnp.linalg.norm(exact))


@pytest.mark.parametrize("norm", [batch_norm, fast_batch_norm])
@pytest.mark.parametrize("shape", [(256, 32), (256, 1, 1, 32), (128, 2, 2, 32)])
def test_channels_that_share_a_range_before_they_are_normalised_have_8_bits(shape, norm):
    """Channels may lie far apart before BatchNorm has brought them to one scale."""
    loss, params = problem(shape, norm)
    plan = jact.make_plan(loss, "int4")(params)
    assert "int8" in plan.bits.values()
    assert error(loss, params, "int4") < 0.05
    assert (of_plan := error(loss, params, plan)) < 0.05
    if norm is fast_batch_norm:
        # It reads the layer's result itself; the other one reads the distance from the mean.
        asked_for = plan.replace(dict.fromkeys(plan.codecs, "int4"))
        assert set(asked_for.bits.values()) == {"int4"}
        assert error(loss, params, asked_for) > 4 * of_plan


@pytest.mark.parametrize("policy", ["int4", "bf16", "int8"])
def test_channels_with_ranges_of_their_own_have_what_the_policy_says(policy):
    loss, params = problem((256, 8, 8, 32), batch_norm)
    plan = jact.make_plan(loss, policy)(params)
    assert set(plan.bits.values()) == {policy}


@pytest.mark.oldest
def test_rules_are_followed():
    loss, params = problem((256, 1, 1, 32), batch_norm)
    policy = jact.Policy(rules=[jact.Rule("*", "int2")], default="int4")
    assert set(jact.make_plan(loss, policy)(params).bits.values()) == {"int2"}
