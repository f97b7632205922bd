"""Elementwise functions of one value, such as GELU, and their derivatives as single residuals.

JAX saves several arrays for such a function, one for each step of it. Where a policy asks for
derivatives, each function is differentiated as a whole: its one residual is its derivative.

So is every function with a singular step, whatever the policy: of `x / sqrt(x**2 + eps)` near zero,
steps that were made again from a decoded `x` would not belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jact import compat
from jact.engine import costs, positive
from jact.engine import program as programs
from jact.engine.program import Equation, Program, Var

#: The names of what is saved of functions with a singular step, as `checkpoint_name` tags.
TAGS = {"jact derivative": "derivative", "jact activation": "activation"}


@dataclasses.dataclass(frozen=True)
class Activation:
    """A nonlinear elementwise function of one value.

    Attributes:
        argument: the value.
        result: what the function makes of it.
        eqns: the steps from one to the other.
        is_singular: whether one of them is singular; see `positive.is_singular`.
    """

    argument: Var
    result: Var
    eqns: tuple[Equation, ...]
    is_singular: bool


def find(program: Program, min_bytes: int, singular_only: bool) -> dict[Var, Activation]:
    """The longest such functions of a program, by their results.

    Args:
        program: the program.
        min_bytes: how many bytes their arguments have at least.
        singular_only: whether only functions with a singular step are looked for.
    """
    arguments: dict[Var, Var] = {}
    constants: set[Var] = set()
    # Results of nonlinear operations, and what follows from them; the same of singular ones.
    steps: set[Var] = set()
    nonlinear: set[Var] = set()
    singular: set[Var] = set()
    signs = positive.signs(program.eqns)
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
            moving = set(operands)
            if not costs.is_linear(eqn, moving) and not costs.is_piecewise_linear(eqn):
                steps.add(out)
            if out in steps or not nonlinear.isdisjoint(moving):
                nonlinear.add(out)
            if positive.is_singular(eqn, moving, signs) or not singular.isdisjoint(moving):
                singular.add(out)
        else:
            read_elsewhere.update(operands)
    producers = programs.Producers(program.eqns)
    found = {}
    for result in nonlinear & read_elsewhere:
        argument, is_singular = arguments[result], result in singular
        size = argument.aval.size * argument.aval.dtype.itemsize
        if size < min_bytes or not _is_float(result) or (singular_only and not is_singular):
            continue
        eqns, _ = producers.cone([result], {argument}.__contains__)
        # Of a single nonlinear step JAX, too, saves one array.
        if is_singular or sum(v in steps for eqn in eqns for v in eqn.outvars) > 1:
            found[result] = Activation(argument, result, tuple(eqns), is_singular)
    return found


def _is_elementwise(eqn: Equation, operands: Sequence[Var]) -> bool:
    if eqn.effects or len(eqn.outvars) != 1:
        return False
    (out,) = eqn.outvars
    if any(v.aval.shape != out.aval.shape for v in operands):
        return False
    if eqn.primitive.name in costs.COMPARING:
        return all(_is_float(v) or v.aval.dtype == jnp.bool_ for v in [*operands, out])
    return eqn.primitive.name in costs.ELEMENTWISE and all(map(_is_float, [*operands, out]))


def _is_float(var: Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating)


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
        if activation.is_singular:
            derivative = checkpoint_name(derivative, "jact derivative")
        return y, tangents[0].astype(y.dtype) * derivative

    result = lax.stop_gradient(result)
    if activation.is_singular:
        result = checkpoint_name(result, "jact activation")
    return function(argument, result)


def tag(eqn: Equation) -> str:
    """The name that `apply` gives to an equation's result; empty if it gives none."""
    return TAGS.get(eqn.params["name"], "") if eqn.primitive.name == "name" else ""
