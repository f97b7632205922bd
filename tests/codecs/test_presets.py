"""Policies by name: they work on every model, and pool what is an image and nothing else."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import jact
from jact import codecs, policy, presets

CONVOLUTION = "Net/Conv_0/conv_general_dilated"
IMAGES = (64, 32, 32, 16)
LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolutions(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)
        x = jnp.tanh(x)
    return jnp.mean(x**2)


def products(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("name", presets.POLICIES)
def test_every_policy_works_on_every_model(name: str) -> None:
    with warnings.catch_warnings():
        # A rule for convolutions says nothing of a model without any.
        warnings.simplefilter("error")
        for fun, shapes in [
            (convolutions, [(3, 3, 8, 8), (8, 16, 16, 8)]),
            (products, [(64, 64), (128, 64)]),
        ]:
            args = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]
            grads = jax.jit(jact.grad(fun, policy=name))(*args)
            assert jnp.isfinite(grads).all() and grads.shape == shapes[0]
            plan = jact.make_plan(fun, name)(*args)
            assert jact.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", presets.MIXED)
def test_images_alone_are_pooled(name: str) -> None:
    chosen = presets.POLICIES[name]
    assert chosen.action(CONVOLUTION, IMAGES, "float32") == codecs.PRESETS[name]
    for other, shape in [
        ("Net/query/dot_general", IMAGES),
        ("Net/Dense_0/dot_general", (64, 512)),
        ("Net/Conv_0/conv_general_dilated", (64, 512, 16)),
    ]:
        assert isinstance(chosen.action(other, shape, "float32"), codecs.Quantize)


def test_levels_of_the_papers() -> None:
    def action(name: str, residual: str = CONVOLUTION) -> codecs.Codec | str:
        return presets.PAPERS[name].action(residual, IMAGES, "float32")

    for name, bits in [("gact-l1", 4), ("gact-l1.1", 8), ("gact-l1.2", 2)]:
        assert action(name) == codecs.Quantize(bits=bits, group_size=256)
    assert action("gact-swap") == codecs.Offload()
    assert action("barley-4x4") == codecs.Pool(window=4)
    assert action("barley-2x2", "Net/Dense_0/dot_general") == "keep"
    for name, bits in [("blpa-8", 8), ("blpa-4", 4)]:
        expected = codecs.Quantize(bits=bits, zero_edge=True, stochastic=False)
        assert action(name) == expected


def test_names() -> None:
    assert {*policy.PRESETS, *presets.POLICIES} == set(presets.NAMES)
    with pytest.raises(ValueError, match="policy must be one of .*pool2-int8.*gact-l1.*; got 'po"):
        jact.grad(products, policy="pool3")
    with pytest.warns(UserWarning, match="matches no residual"):
        rule = jact.Rule("*conv*", "pool2")
        jact.make_plan(products, jact.Policy(rules=[rule]))(jnp.ones((64, 64)), jnp.ones((128, 64)))
