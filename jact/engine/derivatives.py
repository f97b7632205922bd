"""Elementwise functions of one value, such as GELU, and their derivatives as single residuals.

JAX saves several arrays for such a function, one for each step of it. Where a policy asks for
derivatives, each function is differentiated as a whole: its one residual is its derivative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.engine import costs
from jact.engine import program as programs
from jact.engine.program import Equation, Program, Var


@dataclasses.dataclass(frozen=True)
class Activation:
    """A nonlinear elementwise function of one value.

    Attributes:
        argument: the value.
        result: what the function makes of it.
        eqns: the steps from one to the other.
    """

    argument: Var
    result: Var
    eqns: tuple[Equation, ...]


def find(program: Program, least: float) -> dict[Var, Activation]:
    """The longest such functions of a program, by their results.

    Args:
        program: the program.
        least: how many bytes an argument has at least.
    """
    if math.isinf(least):
        return {}
    arguments: dict[Var, Var] = {}
    constants: set[Var] = set()
    # Results of nonlinear operations, and what follows from them.
    steps: set[Var] = set()
    nonlinear: set[Var] = set()
    read_elsewhere = {a for a in program.outvars if compat.is_var(a)}
    for eqn in program.eqns:
        operands = [v for v in programs.operands(eqn) if v not in constants]
        if not operands and not eqn.effects:
            constants.update(eqn.outvars)
            continue
        behind = {arguments.get(v, v) for v in operands}
        if len(behind) == 1 and _is_elementwise(eqn, operands):
            (out,) = eqn.outvars
            (arguments[out],) = behind
            moving = [a for a in eqn.invars if compat.is_var(a) and a in operands]
            if not costs.is_linear(eqn, set(moving)):
                steps.add(out)
            if out in steps or any(v in nonlinear for v in moving):
                nonlinear.add(out)
        else:
            read_elsewhere.update(operands)
    producers = programs.Producers(program.eqns)
    found = {}
    for result in nonlinear & read_elsewhere:
        argument = arguments[result]
        eqns, _ = producers.cone([result], {argument}.__contains__)
        # Of a single nonlinear step JAX, too, saves one array.
        size = argument.aval.size * argument.aval.dtype.itemsize
        if size >= least and sum(v in steps for eqn in eqns for v in eqn.outvars) > 1:
            found[result] = Activation(argument, result, tuple(eqns))
    return found


def _is_elementwise(eqn: Equation, operands: Sequence[Var]) -> bool:
    if eqn.primitive.name not in costs.ELEMENTWISE or eqn.effects:
        return False
    (out,) = eqn.outvars
    return all(
        v.aval.shape == out.aval.shape and jnp.issubdtype(v.aval.dtype, jnp.floating)
        for v in [*operands, out]
    )


def apply(activation: Activation, argument: Any, result: Any) -> Any:
    """The function's result, whose backward pass reads its derivative and nothing else.

    Args:
        activation: the function.
        argument: what it is applied to.
        result: what came out, computed step by step.
    """

    def steps(x: Any) -> Any:
        env = {activation.argument: x}
        programs.evaluate(activation.eqns, env, keep=[activation.result])
        return env[activation.result]

    @jax.custom_jvp
    def function(x: Any, y: Any) -> Any:
        del x
        return y

    @function.defjvp
    def function_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        x, y = primals
        _, derivative = jax.jvp(steps, (x,), (jnp.ones_like(x),))
        return y, tangents[0].astype(y.dtype) * derivative

    return function(argument, lax.stop_gradient(result))
