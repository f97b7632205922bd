"""From a function to JAX's own linearisation of it, as two straight-line programs.

The forward program computes the results and the *residuals*: every value that JAX's backward pass
reads. The backward program computes the gradients from the residuals and the cotangents. What jact
does lies between the two: it chooses from which saved values the residuals are made again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jact import compat
from jact.engine import costs
from jact.engine import program as programs
from jact.engine.program import Atom, Bind, Program, Var


@dataclasses.dataclass(frozen=True)
class Linearized:
    """A function's forward and backward programs.

    Attributes:
        forward: from the inputs to the results, followed by the residuals.
        backward: from the residuals, followed by the cotangents, to the gradients.
        num_outputs: the number of results among `forward.outvars`.
        differentiated: positions of the inputs that have a gradient, in the order of
            `backward.outvars`.
        cotangents: positions of the results that have a cotangent, in the order of `backward`'s
            inputs.
    """

    forward: Program
    backward: Program
    num_outputs: int
    differentiated: tuple[int, ...]
    cotangents: tuple[int, ...]

    @property
    def outputs(self) -> tuple[Atom, ...]:
        """What the forward program returns to the caller."""
        return self.forward.outvars[: self.num_outputs]

    @property
    def residuals(self) -> tuple[Atom, ...]:
        """What the backward program reads, as atoms of the forward program."""
        return self.forward.outvars[self.num_outputs :]

    @property
    def residual_inputs(self) -> tuple[Var, ...]:
        """The backward program's inputs that stand for the residuals."""
        return self.backward.invars[: len(self.residuals)]

    @functools.cached_property
    def divisors(self) -> set[Var]:
        """The variables of the forward program that the backward program divides by."""
        values = dict(zip(self.residual_inputs, self.residuals, strict=True))
        divisors = set()
        for eqn in self.backward.eqns:
            read = [a if compat.is_var(a) else None for a in eqn.invars]
            if eqn.primitive.name in costs.ARRANGING and read[0] in values:
                values[eqn.outvars[0]] = values[read[0]]
            elif eqn.primitive.name == "div" and read[1] in values:
                divisors.add(values[read[1]])
        return {atom for atom in divisors if compat.is_var(atom)}

    @property
    def cotangent_inputs(self) -> tuple[Var, ...]:
        """The backward program's inputs that stand for the cotangents."""
        return self.backward.invars[len(self.residuals) :]


def is_differentiable(dtype: Any) -> bool:
    """Whether values of this dtype have a gradient."""
    return jnp.issubdtype(dtype, jnp.inexact)


def linearize(
    fun: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    wanted: Sequence[bool],
    num_differentiated_outputs: int,
) -> Linearized:
    """Linearises `fun` at values of the inputs' types.

    Args:
        fun: takes and returns flat sequences of arrays.
        inputs: arrays, tracers or types, one for each argument of `fun`.
        wanted: for each input, whether its gradient is wanted. Inputs of other than inexact
            dtype never have one.
        num_differentiated_outputs: how many of the first results take part; the others are
            auxiliary.

    Returns:
        The two programs.
    """
    avals = [compat.type_of(x) for x in inputs]
    at = tuple(
        i
        for i, (a, p) in enumerate(zip(avals, wanted, strict=True))
        if p and is_differentiable(a.dtype)
    )
    tree: Any = None
    cotangents: tuple[int, ...] = ()
    num_outputs = 0

    def forward(*args: Any) -> list[Any]:
        nonlocal tree, cotangents, num_outputs

        def of_differentiated(*moving: Any) -> tuple[list[Any], list[Any]]:
            nonlocal cotangents, num_outputs
            full = list(args)
            for i, x in zip(at, moving, strict=True):
                full[i] = x
            outs = list(fun(*full))
            num_outputs = len(outs)
            cotangents = tuple(
                i
                for i, o in enumerate(outs[:num_differentiated_outputs])
                if is_differentiable(compat.type_of(o).dtype)
            )
            return [outs[i] for i in cotangents], [
                o for i, o in enumerate(outs) if i not in set(cotangents)
            ]

        moving_outs, pull, other_outs = jax.vjp(
            of_differentiated, *[args[i] for i in at], has_aux=True
        )
        by_position = dict(zip(cotangents, moving_outs, strict=True))
        others = iter(other_outs)
        outs = [by_position[i] if i in by_position else next(others) for i in range(num_outputs)]
        leaves, tree = jax.tree.flatten(pull)
        return [*outs, *leaves]

    closed_forward = compat.trace(forward, avals, "the forward pass")
    residual_avals = [a.aval for a in closed_forward.jaxpr.outvars[num_outputs:]]
    cotangent_avals = [
        compat.cotangent_type(closed_forward.jaxpr.outvars[i].aval) for i in cotangents
    ]

    def backward(*args: Any) -> list[Any]:
        leaves, cts = args[: len(residual_avals)], args[len(residual_avals) :]
        return list(jax.tree.unflatten(tree, leaves)(list(cts)))

    closed_backward = compat.trace(
        backward, [*residual_avals, *cotangent_avals], "the backward pass"
    )
    return Linearized(
        programs.flatten(closed_forward),
        programs.flatten(closed_backward),
        num_outputs,
        at,
        cotangents,
    )


def as_function(
    closed: Any, rewriter: Callable[[Program], Bind] = lambda program: compat.bind_equation
) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of its constants and its inputs.

    Args:
        closed: the jaxpr.
        rewriter: makes, for the function's program, what applies an equation to its operands.
    """
    num_consts = len(closed.consts)
    program = programs.flatten(closed)
    bind = rewriter(program)
    # The constants of nested calls follow; they are concrete arrays and stay what they are.
    own_consts = list(program.consts)[:num_consts]

    def run(*args: Any) -> list[Any]:
        env = dict(program.consts) | dict(zip(own_consts, args[:num_consts], strict=True))
        env.update(zip(program.invars, args[num_consts:], strict=True))
        programs.evaluate(program.eqns, env, keep=program.outvars, bind=bind)
        return [programs.read(env, a) for a in program.outvars]

    return run
