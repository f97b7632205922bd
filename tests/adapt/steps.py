"""The training steps that controllers are tested on."""

import jax
import jax.numpy as jnp

import jact

ROWS, WIDTH = 256, 64

#: Those that the present test has made, for what they still do in the background at its end.
CONTROLLERS: list[jact.Controller] = []


def params(scales=(1.0, 0.1, 3.0)):
    keys = jax.random.split(jax.random.key(7), len(scales))
    return [jax.random.normal(k, (WIDTH, WIDTH)) * s / 8 for k, s in zip(keys, scales, strict=True)]


def batch(i, rows=ROWS):
    return jax.random.normal(jax.random.key(100 + i), (rows, WIDTH))


def loss(params, x):
    y = x
    for w in params:
        y = jnp.tanh(y @ w)
    return jnp.mean((y - x) ** 2)


def branches(params, x, gates):
    """Layers side by side: the gate of each says how much its rounding matters."""
    return sum(g * jnp.mean(jnp.tanh(x @ w) ** 2) for w, g in zip(params, gates, strict=True))


class Drifting:
    """A step of `branches` whose gates take turns every twelve steps, so that plans have to follow.

    With 4 bits, one of the three residuals gets 8 and the others 2.
    """

    def __init__(self, **options):
        c = controller(bits=4, codecs=("int8", "int2"), **options)

        @c.jit
        def step(params, x, gates):
            return jact.grad(branches, policy=c)(params, x, gates)

        self.controller, self.step = c, step

    def arguments(self, i):
        gates = [jnp.float32(100.0 if i // 12 % 3 == turn else 1.0) for turn in range(3)]
        return params(), batch(i), gates

    def run(self, first, last):
        for i in range(first, last):
            self.step(*self.arguments(i))


def sgd(controller, **options):
    """A step `(params, x) -> (params, loss)` that follows a controller."""

    @controller.jit(**options)
    def step(params, x):
        value, grads = jact.value_and_grad(loss, policy=controller)(params, x)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    return step


def train(step, values, first, last):
    for i in range(first, last):
        values, _ = step(values, batch(i))
    return values


def controller(**options):
    """A controller that adapts every few steps, and takes every plan that is any better.

    Where a test does not say how many bits it has, it measures no biases, which halves what is
    compiled.
    """
    defaults = {"every": 6, "min_gain": 0.0}
    if "bits" not in options:
        defaults |= {"bits": 5, "codecs": ("int8", "int6", "int4")}
    made = jact.Controller(**(defaults | options))
    CONTROLLERS.append(made)
    return made
