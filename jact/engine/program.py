"""Straight-line programs: jaxprs with every nested call inlined, and how to run a part of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jact import compat

# These are `jax.extend.core`'s Var, Literal and JaxprEqn; their declared types hide what they hold.
type Var = Any
type Atom = Any
type Equation = Any
#: Applies an equation to its operands.
type Bind = Callable[[Equation, Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr without nested calls.

    Attributes:
        invars: the inputs.
        outvars: the outputs; literals and inputs may be among them.
        eqns: the equations, in the order in which they were traced.
        consts: values of the variables that are neither inputs nor results.
    """

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[Equation, ...]
    consts: Mapping[Var, Any]


def flatten(closed: Any) -> Program:
    """Inlines nested `jit` calls, to any depth.

    The shardings that a call fixes become constraints. Functions with derivative rules of their own
    stay whole, so that their rules survive; so do loops, branches and `shard_map`.
    """
    eqns: list[Equation] = []
    consts: dict[Var, Any] = {}
    outvars = _inline(closed.jaxpr, closed.consts, closed.jaxpr.invars, None, eqns, consts)
    return Program(tuple(closed.jaxpr.invars), tuple(outvars), tuple(eqns), consts)


def _inline(
    jaxpr: Any,
    const_values: Sequence[Any],
    args: Sequence[Atom],
    call: Any,
    eqns: list[Equation],
    consts: dict[Var, Any],
) -> list[Atom]:
    """Appends `jaxpr`'s equations, applied to `args`, to `eqns`; returns its results."""
    known: dict[Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
    for var, value in zip(jaxpr.constvars, const_values, strict=True):
        fresh = compat.new_var(var.aval)
        known[var] = fresh
        consts[fresh] = value

    def resolve(atom: Atom) -> Atom:
        return known[atom] if compat.is_var(atom) else atom

    for eqn in jaxpr.eqns:
        operands = [resolve(a) for a in eqn.invars]
        source = eqn.source_info
        if call is not None:
            source = compat.inlined_source(source, call.source_info)
        inner = _inlinable(eqn)
        if inner is not None:
            caller = eqn.replace(source_info=source)
            operands = _constrain(operands, inner.in_shardings, source, eqns)
            results = _inline(inner.jaxpr, inner.consts, operands, caller, eqns, consts)
            results = _constrain(results, inner.out_shardings, source, eqns)
            known.update(zip(eqn.outvars, results, strict=True))
            continue
        # A jaxpr may be shared by several calls, so each inlining needs variables of its own.
        outvars = [v if compat.is_drop_var(v) else compat.new_var(v.aval) for v in eqn.outvars]
        known.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(eqn.replace(invars=operands, outvars=outvars, source_info=source))
    return [resolve(a) for a in jaxpr.outvars]


def _constrain(
    atoms: Sequence[Atom], shardings: Sequence[Any], source: Any, eqns: list[Equation]
) -> list[Atom]:
    """Appends equations that give values their shardings; None leaves a value as it is."""
    result = list(atoms)
    for i, sharding in enumerate(shardings):
        if sharding is not None:
            eqn = compat.constrain_sharding(atoms[i], sharding).replace(source_info=source)
            eqns.append(eqn)
            (result[i],) = eqn.outvars
    return result


class _Call(NamedTuple):
    """A call that means the same when inlined."""

    jaxpr: Any
    consts: Sequence[Any]
    in_shardings: Sequence[Any] = ()
    out_shardings: Sequence[Any] = ()


def _inlinable(eqn: Equation) -> _Call | None:
    if eqn.primitive.name in compat.JIT_PRIMITIVES:
        closed = eqn.params["jaxpr"]
        shardings = compat.jit_shardings(eqn)
        return None if shardings is None else _Call(closed.jaxpr, closed.consts, *shardings)
    if eqn.primitive.name in compat.CLOSED_CALL_PRIMITIVES:
        closed = compat.as_closed(eqn.params["call_jaxpr"])
        return _Call(closed.jaxpr, closed.consts)
    return None


def evaluate(
    eqns: Sequence[Equation],
    env: dict[Var, Any],
    keep: Iterable[Atom],
    before: Callable[[Equation], None] | None = None,
    after: Callable[[Equation], None] | None = None,
    bind: Bind = compat.bind_equation,
) -> None:
    """Runs equations in order, reading variables from and writing results to `env`.

    Results are dropped after their last use, so that outside `jit`, too, dead arrays do not pile
    up.

    Args:
        eqns: the equations; every variable that they read is in `env` or made by an earlier one.
        env: values by variable.
        keep: the results to leave in `env`.
        before: called before each equation, free to change `env`.
        after: called after each equation, free to change `env`.
        bind: applies an equation to its operands.
    """
    last_use: dict[Var, int] = {}
    made: set[Var] = set()
    for position, eqn in enumerate(eqns):
        made.update(eqn.outvars)
        last_use.update(dict.fromkeys([*operands(eqn), *eqn.outvars], position))
    kept = {a for a in keep if compat.is_var(a)}
    for position, eqn in enumerate(eqns):
        if before is not None:
            before(eqn)
        results = bind(eqn, [read(env, a) for a in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
        if after is not None:
            after(eqn)
        for var in {*operands(eqn), *eqn.outvars}:
            if var in made and var not in kept and last_use[var] == position:
                env.pop(var, None)


def read(env: Mapping[Var, Any], atom: Atom) -> Any:
    """The value of a variable or literal."""
    return env[atom] if compat.is_var(atom) else atom.val


def live_equations(eqns: Sequence[Equation], wanted: Iterable[Atom]) -> list[Equation]:
    """The equations that `wanted` depends on, and those with effects, in order."""
    needed = {a for a in wanted if compat.is_var(a)}
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            live.append(eqn)
            needed.update(operands(eqn))
    return live[::-1]


class Producers:
    """Finds the equations behind some values."""

    def __init__(self, eqns: Sequence[Equation]):
        self._eqns = eqns
        self._position = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def cone(
        self, wanted: Iterable[Var], available: Callable[[Var], bool]
    ) -> tuple[list[Equation], list[Var]]:
        """What makes `wanted` from values that are available.

        Returns:
            The equations, in order, and the available values that they or `wanted` itself read. A
            variable that no equation makes counts as available.
        """
        positions: set[int] = set()
        leaves: dict[Var, None] = {}
        stack = list(wanted)
        while stack:
            var = stack.pop()
            position = self._position.get(var)
            if position is None or available(var):
                leaves[var] = None
            elif position not in positions:
                positions.add(position)
                stack.extend(operands(self._eqns[position]))
        return [self._eqns[i] for i in sorted(positions)], list(leaves)


def operands(eqn: Equation) -> list[Var]:
    """The variables that an equation reads, without repetition."""
    return list(dict.fromkeys(a for a in eqn.invars if compat.is_var(a)))
