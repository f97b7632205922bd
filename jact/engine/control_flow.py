"""Loops, branches and mapped regions: their bodies are compressed one by one.

So what a loop stacks up, what a branch saves and what a device of a mesh keeps are codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    eqn: Equation,
    args: Sequence[Any],
    operands: Operands,
    compress_body: CompressBody,
    name: str,
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
        return _ENTER[eqn.primitive.name](eqn, args, operands, compress_body, name)


def _enter_scan(
    eqn: Equation,
    args: Sequence[Any],
    operands: Operands,
    compress_body: CompressBody,
    name: str,
) -> list[Any]:
    """A loop. Its carry is an activation, different in every iteration and encoded in each."""
    num_consts, num_carry = compat.scan_counts(eqn)
    carries = range(num_consts, num_consts + num_carry)
    consts, init, xs = args[:num_consts], args[num_consts : carries.stop], args[carries.stop :]
    body, params = eqn.params["jaxpr"], eqn.params
    inputs = [
        operands.describe(atom, f"carry[{i}]", encoded=is_differentiable(atom.aval.dtype))
        if i in carries
        else operands.describe(atom, f"input[{i}]")
        for i, atom in enumerate(eqn.invars)
    ]
    run = compress_body(body, inputs, name)

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


def _enter_cond(
    eqn: Equation,
    args: Sequence[Any],
    operands: Operands,
    compress_body: CompressBody,
    name: str,
) -> list[Any]:
    """A choice of branches, by the first operand."""
    inputs = [operands.describe(a, f"input[{i}]") for i, a in enumerate(eqn.invars[1:])]
    branches = [
        compress_body(branch, inputs, f"{name}/branch_{i}")
        for i, branch in enumerate(eqn.params["branches"])
    ]
    return list(lax.switch(args[0], branches, *args[1:]))


def _enter_shard_map(
    eqn: Equation,
    args: Sequence[Any],
    operands: Operands,
    compress_body: CompressBody,
    name: str,
) -> list[Any]:
    """A region that each device of a mesh runs on its own part of the operands."""
    inputs = [operands.describe(a, f"input[{i}]") for i, a in enumerate(eqn.invars)]
    params = eqn.params
    run = compress_body(params["jaxpr"], inputs, name)
    mapped = jax.shard_map(
        lambda *parts: tuple(run(*parts)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*args))


_ENTER = {"scan": _enter_scan, "cond": _enter_cond, "shard_map": _enter_shard_map}
