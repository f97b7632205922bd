"""Loops, branches and mapped regions: their bodies are compressed one by one.

So what a loop stacks up, what a branch saves and what a device of a mesh keeps are codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
from jax import lax

from jact import compat
from jact.engine.linearize import is_differentiable
from jact.engine.origins import Input, Operands
from jact.engine.program import Equation

#: Makes a function of a traced body, given what is known of its inputs and the name of its place.
type CompressBody = Callable[[Any, Sequence[Input], str], Callable[..., list[Any]]]


def can_enter(eqn: Equation) -> bool:
    """Whether an equation is control flow whose bodies can be compressed."""
    return eqn.primitive.name in _ENTER and not eqn.effects


def enter(
    eqn: Equation, args: Sequence[Any], operands: Operands, compress_body: CompressBody, name: str
) -> list[Any]:
    """Applies control flow with compressed bodies.

    What a body reads from outside is kept by reference: it belongs to arrays that the surrounding
    function saves or keeps.

    Args:
        eqn: the equation.
        args: its operands.
        operands: what is known of the operands.
        compress_body: see `CompressBody`.
        name: what to call the place.

    Returns:
        The equation's results.
    """
    with compat.equation_context(eqn):
        return _ENTER[eqn.primitive.name](_Place(eqn, args, operands, compress_body, name))


@dataclasses.dataclass(frozen=True)
class _Place:
    """The arguments of `enter`."""

    eqn: Equation
    args: Sequence[Any]
    operands: Operands
    compress_body: CompressBody
    name: str

    def inputs(self, first: int = 0, encoded: Container[int] = ()) -> list[Input]:
        """What is known of the inputs of a body that is passed the operands from `first` on.

        Args:
            first: the position of the first operand that is passed on.
            encoded: positions of those that the body encodes where they have a gradient.
        """
        inputs = []
        for i, atom in enumerate(self.eqn.invars[first:], first):
            if i in encoded:
                moving = is_differentiable(atom.aval.dtype)
                inputs.append(self.operands.describe(atom, f"carry[{i}]", encoded=moving))
            else:
                inputs.append(self.operands.describe(atom, f"input[{i - first}]"))
        return inputs


def _enter_scan(place: _Place) -> list[Any]:
    """A loop. Its carry is an activation, different in every iteration and encoded in each."""
    params, args = place.eqn.params, place.args
    num_consts, num_carry = compat.scan_counts(place.eqn)
    end = num_consts + num_carry
    consts, init, xs = args[:num_consts], args[num_consts:end], args[end:]
    inputs = place.inputs(encoded=range(num_consts, end))
    run = place.compress_body(params["jaxpr"], inputs, place.name)

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = run(*consts, *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    carry, ys = lax.scan(
        step,
        list(init),
        list(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _enter_cond(place: _Place) -> list[Any]:
    """A choice of branches, by the first operand."""
    branches = [
        place.compress_body(branch, place.inputs(1), f"{place.name}/branch_{i}")
        for i, branch in enumerate(place.eqn.params["branches"])
    ]
    return list(lax.switch(place.args[0], branches, *place.args[1:]))


def _enter_shard_map(place: _Place) -> list[Any]:
    """A region that each device of a mesh runs on its own part of the operands."""
    params = place.eqn.params
    run = place.compress_body(params["jaxpr"], place.inputs(), place.name)
    mapped = jax.shard_map(
        lambda *parts: tuple(run(*parts)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*place.args))


_ENTER = {"scan": _enter_scan, "cond": _enter_cond, "shard_map": _enter_shard_map}
