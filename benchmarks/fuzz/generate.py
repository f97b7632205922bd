"""Draws random programs out of a table of operations.

An operation is a function that is given a `Draft` and the number of a value, and returns Python
and the values that it reads, or None where the value is none for it.
"""

import dataclasses
import random
from collections.abc import Callable

import jax

from benchmarks.fuzz.program import Array, Program, Step

type Drawn = tuple[str, tuple[int, ...]] | None

SHAPES = ((16, 24), (4, 12, 16), (2, 8, 8, 6), (32, 8), (3, 5, 7))
LARGEST = 8192
"""Elements: programs are to compile fast."""

UNARY = (
    "jnp.tanh({0})",
    "jnp.sin({0} * 2)",
    "jax.nn.gelu({0})",
    "jax.nn.gelu({0}, approximate=False)",
    "jax.nn.relu({0})",
    "jax.nn.silu({0})",
    "jax.nn.leaky_relu({0})",
    "jax.nn.softplus({0})",
    "jnp.abs({0})",
    "jnp.exp(-{0} * {0})",
    "{0} * lax.rsqrt(1 + {0} * {0})",
    "jnp.log1p({0} * {0})",
    "jnp.clip({0}, -1, 1)",
    "jnp.where({0} > 0, {0}, jnp.expm1(jnp.minimum({0}, 0)))",
    "lax.stop_gradient(jnp.sign({0})) * {0}",
    "jnp.where(jax.random.bernoulli(jax.random.key(3), 0.7, {0}.shape), {0}, 0)",
    "jnp.where({0} > 0, jnp.sqrt(jnp.where({0} > 0, {0}, 1)), 0)",
    "{0} / (1 + jnp.exp(-{0}))",
    "jnp.sqrt({0} * {0} + 1e-3)",
    "jnp.log(jax.nn.sigmoid({0} * 3) + 1e-6)",
    "jnp.log(1 - jnp.tanh({0}) ** 2 + 1e-4)",
    "-jax.nn.softmax({0}) * jnp.log(jax.nn.softmax({0}) + 1e-6)",
    "jax.nn.relu({0}) / (jax.nn.relu({0}).sum(-1, keepdims=True) + 1e-2)",
    "jnp.exp(jnp.where(jnp.sin({0} * 5) > 0, jnp.tanh({0}), -1e9))",
    "jax.nn.softplus(functions.masked({0}))",
    "jax.nn.softmax(functions.masked({0})) * 4",
    "jax.nn.sigmoid(jnp.sort(functions.masked({0}), -1))",
    "lax.scan(functions.running_maximum, jnp.full_like({0}[0], -jnp.inf), {0})[1]",
    "functions.clipped_gradient({0})",
    "functions.soft_absolute({0})",
    "functions.straight_through({0})",
    "functions.counted({0})",
    "jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x) * 2))({0})",
    "jax.jit(lambda x: jnp.tanh(x) * x)({0})",
    "jax.vmap(lambda x: jnp.tanh(x) - x.mean())({0})",
    "lax.map(lambda x: jnp.tanh(x) * x.max(), {0})",
    "lax.cond({0}[(0,) * {0}.ndim] > 0, jnp.tanh, lambda x: x * jax.nn.sigmoid(x), {0})",
    "lax.switch(1, [jnp.sin, lambda x: jnp.tanh(x) * x, jnp.cos], {0})",
    "lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + x / 2, {0})",
    "lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), {0}[0], {0})[1]",
    "lax.scan(lambda c, x: (c / 2 + jnp.sin(x), jnp.tanh(c)), {0}[0], {0}, reverse=True)[1]",
    "lax.associative_scan(lambda a, b: (a + b) / 2, {0})",
    "{0} - {0}.mean(-1, keepdims=True)",
    "({0} - {0}.mean(0)) * lax.rsqrt({0}.var(0) + 1e-3)",
    "{0} * lax.rsqrt(jnp.mean({0} * {0}, -1, keepdims=True) + 1e-3)",
    "{0} / (1 + jnp.linalg.norm({0}, axis=-1, keepdims=True))",
    "jax.nn.softmax({0}) * 4",
    "jax.nn.softmax({0} * 2, axis=0) * 4",
    "jax.nn.log_softmax({0})",
    "{0} - jax.nn.logsumexp({0}, axis=-1, keepdims=True)",
    "{0} + {0}.max(-1, keepdims=True)",
    "jnp.cumsum({0}, -1) / {0}.shape[-1] ** 0.5",
    "jnp.cumprod(1 + jnp.tanh({0}) / 4, 0)",
    "lax.cummax({0}, 1)",
    "lax.cumlogsumexp({0}, 0)",
    "jnp.sort({0}, -1)",
    "jnp.sort({0}, 0)",
    "jnp.take_along_axis({0}, jnp.argsort({0}, -1), -1)",
    "jnp.fft.ifft(jnp.fft.fft({0}.astype(jnp.float32)) * 2j).real.astype({0}.dtype)",
    "jnp.flip({0}, -1)",
    "jnp.roll({0}, 3, 0)",
    "{0}[::-1] + {0}",
    "{0}[jnp.arange({0}.shape[0]) * 7 % {0}.shape[0]]",
    "jnp.zeros_like({0}).at[jnp.arange({0}.shape[0]) // 2].add({0})",
    "{0}.at[1].set(jnp.tanh({0}[0]))",
    "{0}.at[..., 0].multiply({0}[..., 1])",
    "jnp.zeros_like({0}).at[jnp.arange({0}.shape[0]) // 2].max({0})",
    "jax.ops.segment_sum({0}, jnp.arange({0}.shape[0]) // 3, {0}.shape[0])",
    "lax.dynamic_update_slice_in_dim({0}, {0}[:1] * 2, 1, 0)",
)
"""Of one value, in its shape."""

BINARY = (
    "{0} + {1}",
    "{0} * {1}",
    "{0} - jnp.tanh({1})",
    "jnp.maximum({0}, {1})",
    "jnp.where({0} > {1}, {0}, {1} * {1})",
    "{0} / (1 + jnp.abs({1}))",
    "jnp.arctan2({0}, 1 + {1} * {1})",
    "jnp.logaddexp({0}, {1})",
    "jnp.hypot({0}, 1 + jnp.abs({1}))",
    "functions.gated({0}, {1})",
    "lax.scan(lambda c, xy: (jnp.tanh(c * xy[0] + xy[1]),) * 2, {0}[0], ({0}, {1}))[1]",
    "lax.cond({0}.sum() > 0, lambda a, b: a * b, lambda a, b: jnp.tanh(a) - b, {0}, {1})",
    "lax.select(jnp.sin({0} * 5) > 0, {0}, {1})",
    "jax.checkpoint(lambda a, b: jnp.tanh(a) * b)({0}, {1})",
    "jnp.concatenate([{0}, {1}], 0)[::2]",
    "jnp.stack([{0}, {1}], -1).max(-1)",
    "jax.vmap(lambda a, b: a * jnp.sum(b) / b.size ** 0.5)({0}, {1})",
)
"""Of two values of one shape and dtype."""

RESHAPING = (
    "jnp.swapaxes({0}, -1, -2)",
    "jnp.swapaxes({0}, 0, 1)",
    "{0}.reshape(-1, {0}.shape[-1])",
    "{0}.reshape({0}.shape[0], -1)",
    "{0}[:, ::2]",
    "jnp.pad({0}, [(0, 0)] * ({0}.ndim - 1) + [(1, 2)])",
    "jnp.concatenate([{0}, jnp.tanh({0})], -1)",
    "jnp.split({0}, 2, 0)[1]",
    "jnp.repeat({0}, 2, 0)",
    "{0}.mean(1)",
    "{0}.max(1)",
    "{0}.sum(0) / {0}.shape[0] ** 0.5",
    "lax.top_k({0}, 3)[0]",
    "{0}[jnp.arange(6) % {0}.shape[0]]",
    "jnp.einsum('...ld,...md->...lm', {0}, {0}) / {0}.shape[-1] ** 0.5",
    "jnp.einsum('i...,j...->ij', {0}, {0}) / {0}[0].size ** 0.5",
    "functions.inverse({0})",
    "lax.dynamic_slice_in_dim({0}, 1, 2, 0)",
    "jnp.broadcast_to({0}[:, None], ({0}.shape[0], 2, *{0}.shape[1:]))",
    "{0}.astype(jnp.bfloat16)",
    "{0}.astype(jnp.float32)",
)
"""Of one value, into another shape or dtype."""

WITH_WEIGHT = (
    "{0} @ {1}",
    "functions.dense({0}, {1})",
    "jax.checkpoint(lambda x, w: jnp.tanh(x @ w))({0}, {1})",
    "jax.vmap(lambda x: jnp.sin(x @ {1}))({0})",
    "jnp.tanh({0} @ {1}) @ {1}.T",
    "jax.jit(lambda x, w: jax.nn.relu(x @ w))({0}, {1})",
)
"""Of a value and a new matrix, from its last axis to another one."""

WITH_SQUARE = (
    "lax.scan(lambda c, x: (jnp.tanh(c @ {1} + x), c), {0}[0], {0})[1]",
    "lax.scan(lambda c, _: (c + jnp.tanh(c @ {1}), None), {0}, length=3)[0]",
    "lax.scan(jax.checkpoint(lambda c, _: (jnp.sin(c @ {1}), None)), {0}, length=3)[0]",
    "lax.fori_loop(0, 2, lambda i, x: jax.nn.gelu(x @ {1}), {0})",
    "lax.cond({0}.sum() > 0, lambda x: jnp.tanh(x @ {1}), lambda x: x * x, {0})",
    "{0} + jax.nn.relu({0} @ {1})",
)
"""Of a value and a new matrix over its last axis."""

CONVOLUTIONS = (
    "functions.convolve({0}, {1}, 1, 'SAME')",
    "functions.convolve({0}, {1}, 2, 'SAME')",
    "functions.convolve({0}, {1}, 1, 'VALID')",
)

POOLS = ("functions.max_pool({0})", "functions.mean_pool({0})")


class Draft:
    """A program that is being drawn."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.seed = seed
        self.values: dict[int, Array] = {}
        self.inputs: dict[int, Array] = {}
        self.weights: set[int] = set()
        self.steps: list[Step] = []

    def new_input(
        self, shape: tuple[int, ...], weight: bool = False, dtype: str = "float32"
    ) -> int:
        """Adds an argument, and returns its number."""
        number = len(self.values)
        self.inputs[number] = self.values[number] = Array(shape, dtype)
        if weight:
            self.weights.add(number)
        return number

    def value(self) -> int:
        """A value to go on with: mostly a recent one, so that programs become deep."""
        candidates = [i for i in self.values if i not in self.weights]
        return self.random.choice(candidates[-3:] if self.random.random() < 0.7 else candidates)

    def like(self, number: int) -> list[int]:
        """The values of the same shape and dtype, this one included."""
        spec = self.values[number]
        return [i for i, other in self.values.items() if other == spec]

    def add(self, expression: str, operands: tuple[int, ...]) -> bool:
        """Adds a step if JAX can run it and the result is a float array of a reasonable size."""
        step = Step(len(self.values), expression, operands)
        program = Program(0, {i: self.values[i] for i in sorted({*operands})}, frozenset(), (step,))
        data = [
            jax.ShapeDtypeStruct(self.values[i].shape, self.values[i].dtype)
            for i in sorted({*operands})
        ]
        try:
            (out,) = jax.eval_shape(program.outputs(), [], data)
        except (TypeError, ValueError, IndexError):
            return False  # This operation does not take such a shape.
        if out.ndim < 2 or not 0 < out.size <= LARGEST or out.dtype.name not in FLOATS:
            return False
        self.values[step.result] = Array(out.shape, out.dtype.name)
        self.steps.append(step)
        return True


FLOATS = ("float32", "bfloat16")


def unary(draft: Draft, x: int) -> Drawn:
    return draft.random.choice(UNARY), (x,)


def binary(draft: Draft, x: int) -> Drawn:
    return draft.random.choice(BINARY), (x, draft.random.choice(draft.like(x)))


def reshaping(draft: Draft, x: int) -> Drawn:
    return draft.random.choice(RESHAPING), (x,)


def with_weight(draft: Draft, x: int) -> Drawn:
    spec = draft.values[x]
    if draft.random.random() < 0.4:
        side = (spec.shape[-1],) * 2
        return draft.random.choice(WITH_SQUARE), (x, draft.new_input(side, True, spec.dtype))
    shape = (spec.shape[-1], draft.random.choice((8, 12, 16)))
    return draft.random.choice(WITH_WEIGHT), (x, draft.new_input(shape, True, spec.dtype))


def convolution(draft: Draft, x: int) -> Drawn:
    spec = draft.values[x]
    if len(spec.shape) not in (3, 4):
        return None
    window = (3,) * (len(spec.shape) - 2)
    shape = (*window, spec.shape[-1], draft.random.choice((6, 8)))
    if len(spec.shape) == 4 and draft.random.random() < 0.3:
        return draft.random.choice(POOLS), (x,)
    return draft.random.choice(CONVOLUTIONS), (x, draft.new_input(shape, True, spec.dtype))


OPERATIONS: tuple[tuple[Callable[[Draft, int], Drawn], int], ...] = (
    (unary, 8),
    (binary, 4),
    (reshaping, 4),
    (with_weight, 5),
    (convolution, 3),
)
"""Each with how often it comes, relative to the others."""


def draw(seed: int, most: int = 12) -> Program:
    """Draws a program from a seed: one or two arguments, three to `most` steps."""
    draft = Draft(seed)
    shape = draft.random.choice(SHAPES)
    for _ in range(draft.random.choice((1, 1, 2))):
        draft.new_input(shape)
    # Something expensive at first, so that there is something to save.
    draws, weights = zip(*OPERATIONS, strict=True)
    length = draft.random.randint(3, most)
    add_one(draft, with_weight)
    while len(draft.steps) < length:
        add_one(draft, draft.random.choices(draws, weights)[0])
    program = Program(
        seed=seed,
        inputs=draft.inputs,
        weights=frozenset(draft.weights),
        steps=tuple(draft.steps),
        wrapped=draft.random.random() < 0.3,
    )
    return without_unused(program)


def add_one(draft: Draft, operation: Callable[[Draft, int], Drawn]) -> None:
    """Tries to add one operation; the arguments of one that does not fit are dropped again."""
    values, inputs, weights = dict(draft.values), dict(draft.inputs), set(draft.weights)
    drawn = operation(draft, draft.value())
    if drawn is None or not draft.add(*drawn):
        draft.values, draft.inputs, draft.weights = values, inputs, weights


def without_unused(program: Program) -> Program:
    """The program without the arguments that it does not read."""
    read = {i for step in program.steps for i in step.operands}
    inputs = {i: spec for i, spec in program.inputs.items() if i in read}
    return dataclasses.replace(
        program, inputs=inputs, weights=frozenset(program.weights & set(inputs))
    )
