"""Compressing parts of a model, and what compressing must not do."""

import collections
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jact
import jact.memory
from tests.flax import checks
from tests.flax.checks import WIDTH, X


class Block(nn.Module):
    hidden: int = 4 * WIDTH

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        y = nn.gelu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        return x + nn.Dense(WIDTH)(nn.Dropout(0.1, deterministic=not train)(y))


class Stack(nn.Module):
    """Blocks, each with its own policy."""

    policies: tuple[Any, ...]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        for policy in self.policies:
            x = jact.compress(Block, policy)()(x, train=train)
        return x


def loss_of(policies: tuple[Any, ...], train: bool = True) -> tuple[Callable[..., Any], Any]:
    stack = Stack(policies)
    variables = stack.init(jax.random.key(0), X, train=False)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        rngs = {"dropout": jax.random.key(1)}
        return jnp.mean(stack.apply(variables, x, train=train, rngs=rngs) ** 2)

    return loss, variables


def test_one_block_of_several() -> None:
    loss, variables = loss_of(("off", "int8", "off"))
    plain, _ = loss_of(("off",) * 3)
    marks = checks.codes(jax.grad(loss), variables, X)
    assert {mark.name.split("/")[0] for mark in marks} == {"args[1]", "Block_1"}
    got, want = jax.jit(jax.grad(loss))(variables, X), jax.jit(jax.grad(plain))(variables, X)
    checks.assert_close(got, want, checks.TOLERANCE)


def test_policies_of_blocks() -> None:
    loss, variables = loss_of(("int8", "int2", jact.Policy(rules=[jact.Rule("Dense_0/*", "bf16")])))
    marks = checks.codes(jax.grad(loss), variables, X)
    bits = {
        m.name.partition("/")[0]: getattr(m.codec, "bits", None)
        for m in marks
        if "Dense_0" in m.name
    }
    assert bits == {"Block_0": 8, "Block_1": 2, "Block_2": None}


def test_wrapped_blocks_are_not_compressed_twice() -> None:
    """In a loss that jact differentiates, their codes are what is saved, as they are."""
    loss, variables = loss_of(("int8", "bf16"))
    report = jact.report(loss, "int4")(variables, X)
    rows = {row.name: row for row in report.rows if not row.exact}
    # The hidden layer of each block, and the stream between them. The batch is kept anyway, and the
    # loss itself reads the last block's result.
    codecs = {name.removeprefix("Stack/"): row.codec for name, row in rows.items()}
    assert list(codecs.values()) == ["int8", "bf16", "bf16", "int4"]
    assert [name.split("/")[0] for name in codecs] == ["Block_0", "args[1]", "Block_1", "Block_1"]
    int4 = jact.value_and_grad(loss, policy="int4")
    plain, _ = loss_of(("off", "off"))
    got, want = jax.jit(int4)(variables, X), jax.jit(jax.value_and_grad(plain))(variables, X)
    checks.assert_equal(got[0], want[0])
    # What is rounded is rounded as without jact around it, but for what the loss itself reads.
    checks.assert_close(got[1], jax.jit(jax.grad(loss))(variables, X), 0.1)


def test_blocks_and_whole_loss_need_the_same_memory() -> None:
    depth = 8
    loss, variables = loss_of(("int4",) * depth)
    plain, _ = loss_of(("off",) * depth)
    arguments = jax.eval_shape(lambda: (variables, jnp.concatenate([X] * 8)))
    blocks = jact.memory.peak(jax.grad(loss), *arguments)
    whole = jact.memory.peak(jact.grad(plain), *arguments)
    both = jact.memory.peak(jact.grad(loss), *arguments)
    off = jact.memory.peak(jax.grad(plain), *arguments)
    assert max(blocks, both) <= 1.1 * whole < 0.5 * off


def test_an_argument_of_a_jitted_step_is_no_activation() -> None:
    """The batch lives anyway: the first block keeps it, the second encodes what it is given."""
    loss, variables = loss_of(("int8", "int8"))
    inputs = [
        mark.name
        for mark in checks.codes(jax.jit(jax.grad(loss)), variables, X)
        if "args" in mark.name
    ]
    assert inputs == ["args[1]"]
    # Where the whole is differentiated later, an argument may be an activation.
    marks = checks.codes(jax.grad(jax.jit(loss)), variables, X)
    assert len([mark for mark in marks if "args" in mark.name]) == 2


def test_parameters_that_are_no_first_argument_are_no_activations() -> None:
    """Arguments of a jitted step live anyway, whether they are differentiated or not."""
    block = jact.compress(lambda w, v, x: jnp.tanh(x @ w) @ v, "int8")
    w, v = 0.1 * jnp.eye(WIDTH), jnp.ones((WIDTH, WIDTH))

    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(block(w, v, x) ** 2)

    gradient = jax.grad(loss, (0, 1, 2))
    assert [m.name for m in checks.codes(jax.jit(gradient), w, v, X)] == ["dot_general"]
    plain = jax.grad(lambda w, v, x: jnp.mean((jnp.tanh(x @ w) @ v) ** 2), (0, 1, 2))
    checks.assert_close(jax.jit(gradient)(w, v, X), plain(w, v, X), checks.TOLERANCE)


def test_reports_of_wrapped_blocks_compare_with_plain_jax() -> None:
    """What JAX saves is what it saves of the plain blocks, not their codes."""
    plain, variables = loss_of(("off",) * 2)
    blocks, _ = loss_of(("int8", "bf16"))
    want = jact.report(plain, "off")(variables, X).plain_bytes
    for policy in ("int4", "off"):
        report = jact.report(blocks, policy)(variables, X)
        assert report.plain_bytes == want
        assert report.saved_bytes < want / 8
        assert {"int8", "bf16"} <= {row.codec for row in report.rows}
    # Wrapped blocks inside of a jitted function, whose traces JAX keeps.
    jitted = jax.jit(blocks)
    assert jact.report(jitted, "int4")(variables, X).plain_bytes == want
    assert jact.report(jitted, "int4")(variables, X).saved_bytes < want / 8


def test_activations_of_a_loop_around_closed_over_weights_are_encoded() -> None:
    """Inside of a loop's body, an argument that is not seen to be differentiated may well be."""
    block = jact.compress(lambda w, x: jnp.tanh(x @ w), "int8")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, _: (block(w, c), None), x, None, length=3)[0] ** 2)

    def plain_loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w) ** 2)

    w = 0.1 * jax.random.normal(jax.random.key(1), (WIDTH, WIDTH))
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        assert any("args" in mark.name for mark in checks.codes(gradient, w, X))
        checks.assert_close(gradient(w, X), jax.grad(plain_loss)(w, X), checks.TOLERANCE)
    mapped = jax.grad(lambda w, x: jnp.sum(jax.vmap(block, (None, 0))(w, jnp.tanh(x @ w)) ** 2))
    plain = jax.grad(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))
    x = X.reshape(2, -1, WIDTH)
    checks.assert_close(mapped(w, x), plain(w, x), checks.TOLERANCE)


def test_frozen_weights_of_a_block_save_nothing() -> None:
    """What only the gradient of frozen weights would read is not saved."""
    block = jact.compress(lambda w, x: jnp.tanh(jnp.sin(x) @ w["base"]) @ w["head"], "int8")
    w = {name: jnp.eye(WIDTH) for name in ("base", "head")}

    def loss(head: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(block({"base": w["base"], "head": head}, x) ** 2)

    names = [m.name for m in checks.codes(jax.jit(jax.grad(loss)), w["head"], X)]
    assert names == ["dot_general"]


def test_what_is_passed_twice_is_encoded_once() -> None:
    attention = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=WIDTH)
    x = X.reshape(4, -1, WIDTH)
    variables = attention.init(jax.random.key(0), x)

    @jact.compress(policy="int8")
    def attend(variables: Any, queries: jax.Array, keys: jax.Array) -> jax.Array:
        return attention.apply(variables, queries, keys)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x)
        return jnp.mean(attend(variables, x, x) ** 2)

    marks = checks.codes(jax.grad(loss, argnums=(0, 1)), variables, x)
    assert len([mark for mark in marks if "args" in mark.name]) == 1


def operations(fun: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    text = jax.jit(fun).lower(*args).compile().as_text()
    return collections.Counter(re.findall(r" = \S+ ([\w-]+)\(", text))


@pytest.mark.parametrize("train", [False, True])
def test_evaluation_is_the_plain_one(train: bool) -> None:
    """Without differentiation, the compiled program has exactly the plain one's operations."""
    jax.config.update("jax_disable_most_optimizations", False)
    (loss, variables), (plain, _) = loss_of(("int4", "int2"), train), loss_of(("off",) * 2, train)
    assert operations(loss, variables, X) == operations(plain, variables, X)
    checks.assert_equal(jax.jit(loss)(variables, X), jax.jit(plain)(variables, X))


def test_evaluation_of_an_nnx_model_is_the_plain_one() -> None:
    jax.config.update("jax_disable_most_optimizations", False)

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.gelu(self.norm(self.linear(x)))

    for training in (False, True):
        layer = Layer(nnx.Rngs(0))
        if not training:
            layer.eval()
        definition, state = nnx.split(layer)

        def run(wrap: Any, state: Any, x: jax.Array, definition: Any = definition) -> Any:
            layer = nnx.merge(definition, state, copy=True)
            return wrap(layer)(x), nnx.state(layer)

        compressed = functools.partial(run, jact.compress)
        plain = functools.partial(run, lambda layer: layer)
        assert operations(compressed, state, X) == operations(plain, state, X)


def test_second_differentiation_and_forward_mode_name_the_function() -> None:
    loss, variables = loss_of(("int8",))
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(lambda v: loss(v, X), (variables,), (variables,))


def test_importing_jact_imports_no_flax() -> None:
    code = "import jact, sys; assert not {'flax', 'optax'} & set(sys.modules); jact.nnx.grad"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)
