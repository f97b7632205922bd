"""Random programs as text: what runs is what is printed."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.fuzz import functions

SCRIPT = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jact
from benchmarks.fuzz import functions
from benchmarks.fuzz.program import Array, Program


{source}

def total(outputs):
    return lambda weights, data: sum(map(functions.project, outputs(weights, data)))


inputs = {{{inputs}}}
arguments = Program({seed}, inputs, frozenset({weights}), ()).arguments()
plain = jax.jit(jax.grad(total(outputs), (0, 1)))(*arguments)
own = jax.jit({own})(*arguments)
for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(plain), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    print(a.shape, np.linalg.norm(a - b) / np.linalg.norm(b))
"""


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One assignment.

    Attributes:
        result: The number of the value that it makes.
        expression: Python, in which `{0}`, `{1}`, ... stand for the operands.
        operands: The numbers of the values that it reads.
    """

    result: int
    expression: str
    operands: tuple[int, ...]

    def line(self) -> str:
        """The assignment as a line of Python."""
        names = (f"v{i}" for i in self.operands)
        return f"v{self.result} = {self.expression.format(*names)}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of some arrays that are made from a seed, whose result is a scalar.

    Attributes:
        seed: The arrays come from it.
        inputs: The function's arguments, by the number of their value.
        weights: Which of them are parameters: small, and kept by reference where part of the
            program is wrapped in `jact.compress`.
        steps: What it does, in order. Values that no step reads are projected and added up.
        wrapped: Whether the steps are wrapped in `jact.compress`, rather than differentiated as a
            whole by `jact.value_and_grad`.
    """

    seed: int
    inputs: dict[int, Array]
    weights: frozenset[int]
    steps: tuple[Step, ...]
    wrapped: bool = False

    def arguments(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The weights, and the other arguments."""
        arrays = {i: self._argument(i, spec) for i, spec in self.inputs.items()}
        weights = [a for i, a in arrays.items() if i in self.weights]
        return weights, [a for i, a in arrays.items() if i not in self.weights]

    def _argument(self, number: int, spec: Array) -> jax.Array:
        random = np.random.default_rng((self.seed, number))
        scale = np.prod(spec.shape[:-1]) ** -0.5 if number in self.weights else 1.0
        return jnp.asarray(random.normal(size=spec.shape) * scale, spec.dtype)

    def results(self) -> list[int]:
        """The values that no step reads, of those that a step makes."""
        read = {i for step in self.steps for i in step.operands}
        return [step.result for step in self.steps if step.result not in read]

    def source(self) -> str:
        """Python of a function `outputs(weights, data)` that returns a list of arrays."""
        weights = ", ".join(f"v{i}" for i in self.inputs if i in self.weights)
        others = ", ".join(f"v{i}" for i in self.inputs if i not in self.weights)
        lines = [f"[{weights}] = weights", f"[{others}] = data"]
        lines += [step.line() for step in self.steps]
        lines += ["return [" + ", ".join(f"v{i}" for i in self.results()) + "]"]
        return "def outputs(weights, data):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"

    def outputs(self) -> Callable[..., list[jax.Array]]:
        """The function that `source` is the text of."""
        return compiled(self.source())

    def loss(self, transform: Callable[[Any], Any] = lambda f: f) -> Callable[..., jax.Array]:
        """The scalar function `(weights, data)`; `transform` wraps what comes before the sum."""
        outputs = transform(self.outputs())

        def loss(weights: Any, data: Any) -> jax.Array:
            return functools.reduce(jnp.add, map(functions.project, outputs(weights, data)))

        return loss

    def script(self, policy: str) -> str:
        """A file that prints each gradient's relative error under a policy, and runs by itself."""
        inputs = ", ".join(f"{i}: Array({a.shape}, {a.dtype!r})" for i, a in self.inputs.items())
        rounding = f'jact.Policy(default="{policy}", min_bytes=0)'
        if self.wrapped:
            own = f"jax.grad(total(jact.compress(outputs, {rounding})), (0, 1))"
        else:
            own = f"jact.grad(total(outputs), (0, 1), policy={rounding})"
        return SCRIPT.format(
            inputs=inputs,
            seed=self.seed,
            weights=sorted(self.weights),
            source=self.source(),
            own=own,
        )


@functools.lru_cache(maxsize=64)
def compiled(source: str) -> Callable[..., Any]:
    """The function that a program's text defines."""
    scope = {"jax": jax, "jnp": jnp, "lax": lax, "functions": functions}
    exec(compile(source, "<program>", "exec"), scope)  # Its own text, made here.
    return scope["outputs"]
