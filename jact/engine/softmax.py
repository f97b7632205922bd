"""Softmax in any spelling, over axes or over segments: its backward pass reads its result alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jact import compat
from jact.engine import costs
from jact.engine.program import Equation, Var

#: The operand that the terms come through, of each operation between them and their sum.
_MOVING = {
    "broadcast_in_dim": 0,
    "convert_element_type": 0,
    "gather": 0,
    "reduce_sum": 0,
    "reshape": 0,
    "scatter-add": 2,
}

#: More operations than these are no spelling of a sum.
_LONGEST = 8


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A division of exponentials by their sum.

    Attributes:
        numerator: the variable of the exponentials.
        sums: the equations that lead from them to the sum, repeated for each of its terms. They are
            linear together, and all terms of a sum find the same.
        passes: how often the backward pass takes the mean off. The exact result sums up to one, and
            once is enough. A decoded one does not: of what is common to all terms a part is left,
            as large as the sum is off, which a second pass makes as small as its square.
    """

    numerator: Var
    sums: tuple[Equation, ...]
    passes: int


def find(eqns: Sequence[Equation]) -> dict[Var, Softmax]:
    """The softmax functions of a program, by the variables of their results."""
    producers = {v: eqn for eqn in eqns for v in eqn.outvars}
    found = {}
    for eqn in eqns:
        if eqn.primitive.name != "div" or not compat.is_var(eqn.invars[0]):
            continue
        numerator = eqn.invars[0]
        exponential = producers.get(numerator)
        if exponential is None or exponential.primitive.name != "exp":
            continue
        sums = _between(numerator, eqn.invars[1], producers)
        if _sums_over_axes(numerator, sums) or _sums_over_segments(sums, producers):
            # Attention's is made again from scores, and sums up to one.
            passes = 1 if _follows_scores(exponential, producers) else 2
            found[eqn.outvars[0]] = Softmax(numerator, tuple(sums), passes)
    return found


def apply(
    division: Equation,
    softmax: Softmax,
    exponent: Any,
    args: Sequence[Any],
    operands: Mapping[Var, Sequence[Any]],
) -> Any:
    """A softmax whose derivative is made of its result.

    JAX's own gradient of the exponentials, their sum and the quotient reads all three. With inexact
    exponentials and an exact sum they do not belong together, and the gradient, a small difference
    of large numbers, is off by more than itself.

    Args:
        division: the equation.
        softmax: what it is.
        exponent: the operand of the exponential.
        args: the operands of the division.
        operands: those of the equations in `softmax.sums`, by their results.
    """
    others = [operands[eqn.outvars[0]] for eqn in softmax.sums]

    def total(terms: Any, others: Sequence[Sequence[Any]]) -> Any:
        for eqn, own in zip(softmax.sums, others, strict=True):
            place = _MOVING[eqn.primitive.name]
            own = [terms if i == place else operand for i, operand in enumerate(own)]
            (terms,) = compat.bind_equation(eqn, own)
        return terms

    @jax.custom_jvp
    def divide(exponent: Any, exponentials: Any, sums: Any, others: Any) -> Any:
        del exponent, others
        (out,) = compat.bind_equation(division, [exponentials, sums])
        return out

    @divide.defjvp
    def divide_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        out, tangent = divide(*primals), tangents[0]
        for _ in range(softmax.passes):
            tangent = tangent - total(out * tangent, primals[3])
        return out, out * tangent

    return divide(exponent, *lax.stop_gradient((args[0], args[1], others)))


def _follows_scores(eqn: Equation, producers: Mapping[Var, Equation]) -> bool:
    """Whether an equation's operands are cheaply made of products that are run again."""
    pending, seen = [eqn], set()
    while pending:
        eqn = pending.pop()
        if costs.is_batched_product(eqn):
            return True
        if costs.is_expensive(eqn):
            continue
        for atom in eqn.invars:
            if compat.is_var(atom) and atom in producers and atom not in seen:
                seen.add(atom)
                pending.append(producers[atom])
    return False


def _between(terms: Var, total: Any, producers: Mapping[Var, Equation]) -> list[Equation]:
    """The equations from the terms to what may be their sum; none where they do not lead there."""
    chain: list[Equation] = []
    while total is not terms:
        eqn = producers.get(total) if compat.is_var(total) else None
        if eqn is None or eqn.primitive.name not in _MOVING or len(chain) == _LONGEST:
            return []
        chain.append(eqn)
        total = eqn.invars[_MOVING[eqn.primitive.name]]
    return chain[::-1]


def _moves(chain: Sequence[Equation]) -> list[Equation]:
    """The equations of a chain that do more than convert."""
    return [eqn for eqn in chain if eqn.primitive.name != "convert_element_type"]


def _sums_over_axes(terms: Var, chain: Sequence[Equation]) -> bool:
    """Whether a chain sums along axes and repeats each sum along these, and no others."""
    reduction, *changes = _moves(chain) or [None]
    if reduction is None or reduction.primitive.name != "reduce_sum":
        return False
    shape, axes = terms.aval.shape, tuple(reduction.params["axes"])
    rest = tuple(axis for axis in range(len(shape)) if axis not in axes)
    ones = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    # The axis of the terms that each axis of the sum stands for.
    place = rest
    for change in changes:
        new = change.outvars[0].aval.shape
        if change.primitive.name == "broadcast_in_dim":
            dims = change.params["broadcast_dimensions"]
            expected = rest if place == rest else tuple(range(len(shape)))
            if len(new) != len(shape) or tuple(dims) != expected:
                return False
        elif change.primitive.name != "reshape" or new != ones:
            return False
        place = tuple(range(len(shape)))
    return True


def _sums_over_segments(chain: Sequence[Equation], producers: Mapping[Var, Equation]) -> bool:
    """Whether a chain sums the terms of each segment and hands the sums back to their terms.

    As in `jax.ops.segment_sum(terms, segments, count)[segments]`. A term whose segment does not
    exist is added to none, and may read the sum of any other.
    """
    moves = _moves(chain)
    if [eqn.primitive.name for eqn in moves] != ["scatter-add", "gather"]:
        return False
    scatter, gather = moves
    there, back = scatter.params["dimension_numbers"], gather.params["dimension_numbers"]
    slices = [
        1 if axis in back.collapsed_slice_dims or axis in back.operand_batching_dims else size
        for axis, size in enumerate(gather.invars[0].aval.shape)
    ]
    return (
        tuple(there.update_window_dims) == tuple(back.offset_dims)
        and tuple(there.inserted_window_dims) == tuple(back.collapsed_slice_dims)
        and tuple(there.scatter_dims_to_operand_dims) == tuple(back.start_index_map)
        and tuple(there.operand_batching_dims) == tuple(back.operand_batching_dims)
        and tuple(there.scatter_indices_batching_dims) == tuple(back.start_indices_batching_dims)
        and list(gather.params["slice_sizes"]) == slices
        and scatter.invars[1].aval.shape == gather.invars[1].aval.shape
        and _is_zero(scatter.invars[0], producers)
        and _indices(scatter.invars[1], producers) is _indices(gather.invars[1], producers)
    )


def _is_zero(atom: Any, producers: Mapping[Var, Equation]) -> bool:
    while compat.is_var(atom):
        eqn = producers.get(atom)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        atom = eqn.invars[0]
    return not np.any(atom.val)


def _indices(atom: Any, producers: Mapping[Var, Equation]) -> Any:
    """What indices are made from, where only their shape and the negative ones are changed."""
    while compat.is_var(atom) and (eqn := producers.get(atom)) is not None:
        name, operand = eqn.primitive.name, eqn.invars[0]
        if name == "select_n" and _is_negative(operand, eqn.invars[1], producers):
            atom = eqn.invars[1]
        elif name in ("broadcast_in_dim", "convert_element_type", "reshape"):
            if operand.aval.size != atom.aval.size:
                return atom
            atom = operand
        else:
            return atom
    return atom


def _is_negative(predicate: Any, x: Any, producers: Mapping[Var, Equation]) -> bool:
    """Whether a variable tells where another one is below zero."""
    eqn = producers.get(predicate) if compat.is_var(predicate) else None
    if eqn is None or eqn.primitive.name != "lt" or eqn.invars[0] is not x:
        return False
    return _is_zero(eqn.invars[1], producers)
