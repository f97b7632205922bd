"""Fills: infinities and huge numbers that stand for nothing, as `-1e9` for a masked score does.

In one group with a fill, codes of equal steps would bring back nothing of other elements, and of
an infinity there is no multiple. So what holds fills is saved before they are put in where that
can be, and cast to a shorter float where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jact import compat
from jact.engine import costs
from jact.engine.program import Atom, Equation, Var

#: What is at least as large, and constant, is a fill.
LARGE = 1e4

#: Constants of more elements are not looked at.
_MOST_ELEMENTS = 2**14

#: Operations that put constants in the place of elements, or make arrays of them.
_FILLING = costs.ASSEMBLING | {"broadcast_in_dim", "convert_element_type", "scatter"}

#: Operations whose results hold the fills of their operands.
_PASSING = (
    _FILLING
    | costs.LINEAR
    | costs.PIECEWISE_LINEAR
    | {"cumlogsumexp", "cummax", "cummin", "div", "mul", "reduce_max", "reduce_min", "sort"}
    | {"scatter-add", "stop_gradient", "top_k"}
)


def of_constants(consts: Mapping[Var, Any]) -> set[Var]:
    """Which of a program's constants hold fills."""
    return {var for var, value in consts.items() if _is_known(value) and _holds_large(value)}


def follow(eqn: Equation, filled: set[Var], exact: Callable[[Var], bool]) -> None:
    """Adds the results of an equation that hold fills.

    Args:
        eqn: the equation.
        filled: what holds fills so far.
        exact: whether a variable follows from arguments and constants alone.
    """
    name = eqn.primitive.name
    if name == "scan":
        first, num_carry = compat.scan_counts(eqn)
        carry = zip(eqn.invars[first : first + num_carry], eqn.outvars[:num_carry], strict=True)
        filled.update(out for atom, out in carry if compat.is_var(atom) and atom in filled)
        return
    holds = any(compat.is_var(a) and a in filled for a in eqn.invars) and name in _PASSING
    # (1 - mask) * -1e9
    scales = name == "mul" and all(not compat.is_var(a) or exact(a) for a in eqn.invars)
    brings = (name in _FILLING or scales) and any(map(is_fill, eqn.invars))
    if holds or brings:
        filled.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def is_fill(atom: Atom) -> bool:
    """Whether an operand is a constant that stands for nothing."""
    return not compat.is_var(atom) and _holds_large(atom.val)


def _is_known(value: Any) -> bool:
    if not isinstance(value, np.ndarray | np.generic | jax.Array) or compat.is_tracer(value):
        return False
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        # Spread over processes: each has some of the elements, unless all have the same.
        return value.is_fully_replicated and value.size <= _MOST_ELEMENTS
    return value.size <= _MOST_ELEMENTS


def _holds_large(value: Any) -> bool:
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return False
    return bool(np.any(np.abs(np.asarray(value, np.float64)) >= LARGE))
