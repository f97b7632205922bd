"""Which values are positive, and which functions are singular.

One that is singular at zero is not so of what is bounded away from zero, as `1 + exp(-x)` is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from jact import compat
from jact.engine import costs
from jact.engine import program as programs
from jact.engine.program import Atom, Equation, Var


class Sign(enum.IntEnum):
    """What is known of all elements of a value."""

    UNKNOWN = 0
    #: Not less than zero.
    NONNEGATIVE = 1
    #: Greater than zero.
    POSITIVE = 2
    #: Greater than `BOUND`, or products or powers of such.
    BOUNDED = 3


#: A constant that small functions do not get close to zero by: no `eps` that guards a logarithm.
BOUND = 2**-6

_ALWAYS = {
    "abs": Sign.NONNEGATIVE,
    "cosh": Sign.BOUNDED,
    "exp": Sign.POSITIVE,
    "exp2": Sign.POSITIVE,
    "logistic": Sign.POSITIVE,
}

#: Results whose elements are elements of the first operand, sums of them, or roots.
_LIKE_FIRST = costs.ARRANGING | {
    "cbrt",
    "convert_element_type",
    "copy",
    "cumsum",
    "dynamic_slice",
    "expand_dims",
    "log1p",
    "name",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "sharding_constraint",
    "slice",
    "sqrt",
    "stop_gradient",
}

#: Results of which each element is at least that of one of several operands.
_CHOOSING = {"concatenate", "min", "mul", "select_n"}


def signs(eqns: Iterable[Equation]) -> dict[Var, Sign]:
    """What is known of the results of a program's equations; of its inputs nothing is."""
    known: dict[Var, Sign] = {}
    for eqn in eqns:
        follow(eqn, known)
    return known


def follow(eqn: Equation, known: dict[Var, Sign]) -> None:
    """Adds what is known of an equation's result to what is known of other values."""
    if len(eqn.outvars) == 1 and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        sign = _of_result(eqn, known)
        if sign != Sign.UNKNOWN:
            known[eqn.outvars[0]] = sign


def is_singular(eqn: Equation, inexact: set[Var], known: Mapping[Var, Sign]) -> bool:
    """Whether an equation could blow up an error of its `inexact` operands.

    Args:
        eqn: the equation.
        inexact: the variables that would be made from decoded values.
        known: what is known of the values before the equation.
    """
    operand = costs.singular_operand(eqn, inexact)
    if operand is None:
        return False
    sign = known.get(operand, Sign.UNKNOWN)
    # The logarithm of 1 + x is singular at -1.
    if eqn.primitive.name == "log1p":
        return sign == Sign.UNKNOWN
    return eqn.primitive.name not in costs.SINGULAR_AT_ZERO or sign != Sign.BOUNDED


def _of_result(eqn: Equation, known: Mapping[Var, Sign]) -> Sign:
    name = eqn.primitive.name
    operands = [_of_operand(a, known) for a in eqn.invars]
    if name in _ALWAYS:
        return max(_ALWAYS[name], operands[0])
    if name == "custom_jvp_call":
        return _of_call(eqn, operands)
    if name in _LIKE_FIRST:
        return operands[0]
    if name in _CHOOSING:
        least = min(operands[1:] if name == "select_n" else operands)
        is_square = name == "mul" and eqn.invars[0] is eqn.invars[1]
        return max(least, Sign.NONNEGATIVE) if is_square else least
    if name == "max":
        return max(operands)
    if name == "add":
        return max(operands) if min(operands) != Sign.UNKNOWN else Sign.UNKNOWN
    if name in ("square", "integer_pow", "pow"):
        return _of_power(eqn, operands[0])
    if name in ("rsqrt", "div"):
        return min(Sign.POSITIVE, *operands)
    return Sign.UNKNOWN


def _of_power(eqn: Equation, base: Sign) -> Sign:
    exponent = eqn.params.get("y", 2)
    if eqn.primitive.name == "pow":
        exponent = None if compat.is_var(eqn.invars[1]) else float(eqn.invars[1].val)
    if exponent is not None and exponent % 2 == 0:
        base = max(base, Sign.NONNEGATIVE)
    return base if exponent is not None and exponent > 0 else min(Sign.POSITIVE, base)


def _of_operand(atom: Atom, known: Mapping[Var, Sign]) -> Sign:
    if compat.is_var(atom):
        return known.get(atom, Sign.UNKNOWN)
    least = np.min(np.asarray(atom.val, np.float64), initial=np.inf)
    if least >= BOUND:
        return Sign.BOUNDED
    return Sign.POSITIVE if least > 0 else Sign.NONNEGATIVE if least == 0 else Sign.UNKNOWN


def _of_call(eqn: Equation, operands: list[Sign]) -> Sign:
    """The sign of a function with a derivative of its own, such as a softmax."""
    inner = programs.flatten(eqn.params["call_jaxpr"])
    known = dict(zip(inner.invars, operands, strict=True))
    for step in inner.eqns:
        follow(step, known)
    return _of_operand(inner.outvars[0], known)
