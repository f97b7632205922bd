"""Loops: their bodies are compressed one by one, so that what a loop stacks up is codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from jact import compat
from jact.engine.graph import Input
from jact.engine.linearize import is_differentiable
from jact.engine.program import Equation

#: Makes a function of a traced body, given what is known of its inputs and the loop's name.
type CompressBody = Callable[[Any, Sequence[Input], str], Callable[..., list[Any]]]


def can_enter(eqn: Equation) -> bool:
    """Whether an equation is a loop whose body can be compressed."""
    return eqn.primitive.name == "scan" and not eqn.effects


def enter(eqn: Equation, args: Sequence[Any], compress_body: CompressBody, name: str) -> list[Any]:
    """Runs a `lax.scan` with a compressed body.

    What the body reads from outside is kept by reference, and the slices that it scans over belong
    to arrays that the surrounding function saves or keeps. The carry is an activation: it is
    different in every iteration, and encoded in each.

    Args:
        eqn: the loop.
        args: its operands.
        compress_body: see `CompressBody`.
        name: what to call the loop.

    Returns:
        The loop's results.
    """
    num_consts, num_carry = compat.scan_counts(eqn)
    consts, init, xs = (
        args[:num_consts],
        args[num_consts : num_consts + num_carry],
        args[num_consts + num_carry :],
    )
    body = eqn.params["jaxpr"]
    inputs = [
        Input(
            f"{'carry' if is_carry else 'input'}[{i}]",
            encoded=is_carry and is_differentiable(v.aval.dtype),
        )
        for i, v in enumerate(body.jaxpr.invars)
        for is_carry in [num_consts <= i < num_consts + num_carry]
    ]
    run = compress_body(body, inputs, name)

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = run(*consts, *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    params = eqn.params
    with compat.equation_context(eqn):
        carry, ys = lax.scan(
            step,
            list(init),
            list(xs),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return [*carry, *ys]
