"""The forward pass: the function itself, run once, and the codes of what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jact import codecs, compat
from jact.codecs import Codec
from jact.codecs.offload import on_device
from jact.engine import costs, marks
from jact.engine import program as programs
from jact.engine.linearize import Linearized, is_differentiable
from jact.engine.marks import Mark
from jact.engine.program import Atom, Equation, Program, Var
from jact.engine.select import Saved, Selection


def run_forward(
    linearized: Linearized,
    selection: Selection,
    inputs: Sequence[Any],
    seeds: Sequence[Any],
    scope: str = "",
    detach: Callable[[Any], Any] = lax.stop_gradient,
    replace: Callable[[Saved, Any], Any] = lambda entry, value: value,
) -> tuple[list[Any], list[Any]]:
    """Runs the function and encodes what the backward pass needs.

    Args:
        linearized: the function.
        selection: what to save.
        inputs: arrays, one for each input.
        seeds: of the rounding noise, one for each saved value.
        scope: the name of the loop whose body this is, ending in a slash; empty if there is none.
        detach: what a value passes through before it is encoded.
        replace: gives what is encoded in the place of a value.

    Returns:
        The function's results and one code for each saved value.
    """
    # As constants, the seeds would make a kernel of its own out of each encoding.
    seeds = lax.optimization_barrier([jnp.uint32(seed) for seed in seeds])
    program, saved = linearized.forward, selection.saved
    env = dict(program.consts) | dict(zip(program.invars, inputs, strict=True))
    index = {entry.var: i for i, entry in enumerate(saved)}
    codes: list[Any] = [None] * len(saved)
    unsettled: list[int] = []

    def encode(var: Any) -> None:
        if (i := index.get(var)) is None:
            return
        codec = on_device(saved[i].codec)
        with compat.mesh_of(var.aval), jax.named_scope(f"{saved[i].name}/{marks.ENCODE}"):
            codes[i] = codec.encode(replace(saved[i], detach(env[var])), seeds[i])
        # What is saved as it is needs no haste: it is its own code.
        if not isinstance(saved[i].codec, codecs.Keep):
            unsettled.append(i)

    def settle(variables: Sequence[Var]) -> None:
        """Makes the readers of some variables wait for the codes so far.

        Left alone, XLA may put the encoding off until the backward pass, and keep the full arrays
        until then.
        """
        waiting = [v for v in variables if is_differentiable(compat.type_of(env[v]).dtype)]
        if not unsettled or not waiting:
            return
        arrays = [v for v in waiting if v.aval.size > 1]
        scalars = [v for v in waiting if v.aval.size <= 1]
        (values, new_codes), totals = compat.barrier(
            ([env[v] for v in arrays], [codes[i] for i in unsettled]), [env[v] for v in scalars]
        )
        env.update(zip([*arrays, *scalars], [*values, *totals], strict=True))
        for i, code in zip(unsettled, new_codes, strict=True):
            codes[i] = code
        unsettled.clear()

    def settle_before(eqn: Equation) -> None:
        if costs.is_expensive(eqn):
            settle([v for v in programs.operands(eqn) if v in selection.made])

    def encode_results(eqn: Equation) -> None:
        for var in eqn.outvars:
            # What will be in memory anyway had better be encoded alone.
            if var in index and var in read_in_memory:
                settle([var])
            encode(var)

    for var in program.invars:
        encode(var)
    eqns = _ordered(program, linearized.outputs, index)
    read_in_memory = {v for e in eqns if costs.is_expensive(e) for v in programs.operands(e)}
    programs.evaluate(
        eqns,
        env,
        keep=linearized.outputs,
        before=settle_before,
        after=encode_results,
    )
    settle([a for a in linearized.outputs if compat.is_var(a)])
    outputs = [programs.read(env, a) for a in linearized.outputs]
    return outputs, [
        marks.write(_sent(code, entry.codec), _marks(entry, scope))
        for code, entry in zip(codes, saved, strict=True)
    ]


def _ordered(program: Program, outputs: Sequence[Atom], saved: Iterable[Var]) -> list[Equation]:
    """The equations behind the function's results and what it saves, in the order to run them.

    What the backward pass alone needs is made, and can be encoded, as soon as there is what it is
    made from: before the function goes on from the same values, and no longer needs them.
    """
    function = {id(eqn) for eqn in programs.live_equations(program.eqns, outputs)}
    live = programs.live_equations(program.eqns, [*outputs, *saved])
    # For each equation, the function's own one that it follows, or is.
    places: list[int] = []
    made_at: dict[Var, int] = {}
    for i, eqn in enumerate(live):
        behind = (made_at.get(v, -1) for v in programs.operands(eqn))
        places.append(i if id(eqn) in function else max(behind, default=-1))
        made_at.update((v, places[-1]) for v in eqn.outvars)
    # Each place is first that of the function's equation, as the others depend on its results.
    return [live[i] for i in sorted(range(len(live)), key=lambda i: places[i])]


def _sent(code: Any, codec: Codec) -> Any:
    """A code where its codec keeps it.

    It leaves for the host only now, as XLA does not follow a transfer through a barrier.
    """
    return codec.send(code) if isinstance(codec, codecs.Offload) else code


def _marks(entry: Saved, scope: str) -> list[Mark]:
    if inner := entry.value.marks:
        return [dataclasses.replace(mark, name=scope + mark.name) for mark in inner]
    aval = entry.value.aval
    mark = Mark(
        name=scope + entry.name,
        in_loop=bool(scope),
        line=entry.line,
        reason=entry.reason,
        exact=entry.exact,
        codec=entry.codec,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        raw_bytes=entry.raw_bytes,
    )
    return [mark]
