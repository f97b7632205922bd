"""Which values to save: a minimum cut before what the backward pass reads."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Sequence

from jact import codecs, compat
from jact.codecs import Codec
from jact.engine import costs
from jact.engine import graph as graphs
from jact.engine import program as programs
from jact.engine.linearize import Linearized
from jact.engine.marks import Mark
from jact.engine.mincut import minimum_cut
from jact.engine.origins import Input
from jact.engine.program import Var
from jact.engine.storage import storage
from jact.engine.values import Graph, Value
from jact.plan import Plan
from jact.policy import Policy

#: How much dearer it is to save a value of pieces of different size. Those in one group would share
#: a range, and the smaller ones drown in its rounding; so their parts are saved where that will do.
_MIXED = 4

#: How much dearer it is to save what a singular function magnifies the error of.
_STEEP = 16

#: Bytes that each further saved array counts for, so that of two equal choices the one with fewer
#: arrays wins.
_BYTES_PER_ARRAY = 64


#: How many times the bytes are worth the unbiased gradients that saving derivatives gives. Going
#: from 2 to 4 bits costs 1.8 times the bytes, and the error falls further.
_DERIVATIVES = 1.5


@dataclasses.dataclass(frozen=True)
class Saved:
    """One value that the forward pass saves for the backward pass.

    Attributes:
        name: its stable name: that of the dear operation it follows from.
        line: the user's line that made what it is named after.
        value: the value.
        codec: how it is stored.
        exact: why it is stored exactly; empty when a codec of the policy stores it.
        reason: why it, or something it follows from, could not be made again.
    """

    name: str
    line: str
    value: Value
    codec: Codec
    exact: str
    reason: str

    @property
    def var(self) -> Var:
        """Its variable in the forward program."""
        return self.value.var

    @property
    def raw_bytes(self) -> int:
        """Bytes of the value itself."""
        return self.value.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of what is saved of it."""
        return self.codec.nbytes(self.value.aval.shape, self.value.aval.dtype)


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the forward pass saves and the backward pass holds.

    Attributes:
        saved: the values to save, in the order in which the forward pass makes them.
        held: values that follow from dear operations that the backward pass runs again. It holds
            them in memory while it needs them, so that XLA does not keep what they were made from.
        made: values that dear operations or encoded inputs stand behind.
    """

    saved: tuple[Saved, ...]
    held: frozenset[Var]
    made: frozenset[Var]


def select(linearized: Linearized, inputs: Sequence[Input], policy: Policy | Plan) -> Selection:
    """Chooses the values to save.

    Args:
        linearized: the function.
        inputs: what is known of its inputs.
        policy: how values are stored. A plan stores the values that its basis chooses.

    Returns:
        The cheapest set of values from which, and from the inputs kept by reference, every residual
        follows by cheap operations; and what to hold of what is made again.

    Raises:
        ValueError: when a plan was made for another function; names what differs.
    """
    basis = policy.basis if isinstance(policy, Plan) else policy
    graph, chosen = _choose_with_derivatives(linearized, inputs, basis)
    _warn_of_unused_rules(graph, basis)
    needed = _needed(graph, linearized)
    if all(isinstance(graph.values[v].codec, codecs.Keep) for v in chosen | needed):
        # Nothing would be smaller, so nothing is worth making again: save what JAX would.
        chosen = needed
    chosen = _before_arrangement(graph, linearized, chosen)
    saved = _name(graph, [v for v in graph.values if v in chosen])
    if isinstance(policy, Plan):
        saved = _apply(policy, saved)
    return Selection(tuple(saved), frozenset(_held(graph, linearized)), frozenset(graph.values))


def _choose_with_derivatives(
    linearized: Linearized, inputs: Sequence[Input], policy: Policy
) -> tuple[Graph, set[Var]]:
    """The graph and the variables to save, with derivatives or without as the policy says."""
    choices = []
    for derivatives in policy.derivative_choices:
        graph = graphs.build(linearized, inputs, policy, derivatives)
        chosen = choose(graph, linearized)
        size = sum(graph.values[v].stored_bytes for v in chosen)
        choices.append((size, graph, chosen))
    smallest, most = choices[0], choices[-1]
    return (most if most[0] <= _DERIVATIVES * smallest[0] else smallest)[1:]


def choose(graph: Graph, linearized: Linearized) -> set[Var]:
    """The variables to save: the minimum cut, with capacities in bytes after encoding."""
    needed = _needed(graph, linearized)
    relevant = _ancestors(graph, needed)
    capacities = {
        v: value.stored_bytes * _price(value) + _BYTES_PER_ARRAY
        for v, value in graph.values.items()
        if v in relevant
    }
    edges = [(u, v) for u, v in graph.edges if u in relevant and v in relevant]
    pinned = [v for v in relevant if graph.values[v].pinned]
    return minimum_cut(capacities, edges, pinned, needed)


def _price(value: Value) -> int:
    """What a byte of a value counts for."""
    return _STEEP if value.steep and not value.exact else _MIXED if value.mixed else 1


def _before_arrangement(graph: Graph, linearized: Linearized, chosen: set[Var]) -> set[Var]:
    """The chosen values as they were before they were reshaped or transposed.

    That is the order of elements in which they were computed. XLA would have to bring what a
    product made for others to read into their order once more for the encoding.
    """
    makers = {v: eqn for eqn in linearized.forward.eqns for v in eqn.outvars}

    def before(var: Var) -> Var:
        value = graph.values[var]
        while not value.pinned and makers[value.var].primitive.name in costs.ARRANGING:
            (operand,) = (v for v in programs.operands(makers[value.var]) if v in graph.values)
            earlier = graph.values[operand]
            stored_alike = (earlier.codec, earlier.exact) == (value.codec, value.exact)
            grows = earlier.stored_bytes > value.stored_bytes
            if earlier.aval.size != value.aval.size or not stored_alike or grows:
                break
            value = earlier
        return value.var

    return {before(v) for v in chosen}


def _held(graph: Graph, linearized: Linearized) -> set[Var]:
    """The least to hold of what is made again by dear operations; statistics count for nothing.

    Of a softmax over scores that is the exponentials and their sums: not the scores, which XLA
    would otherwise keep to make the exponentials twice.
    """
    values = {v: value for v, value in graph.values.items() if value.rerun}
    needed = [v for v in _needed(graph, linearized) if v in values]
    largest = max((value.raw_bytes for value in values.values()), default=0)
    small = largest * costs.STATISTIC_FRACTION
    capacities = {v: x.raw_bytes if x.raw_bytes > small else 0 for v, x in values.items()}
    edges = [(u, v) for u, v in graph.edges if u in values and v in values]
    return minimum_cut(capacities, edges, graph.rerun, needed) if needed else set()


def _needed(graph: Graph, linearized: Linearized) -> set[Var]:
    """The made values that the backward pass reads."""
    return {a for a in linearized.residuals if compat.is_var(a) and a in graph.values}


def _ancestors(graph: Graph, needed: Iterable[Var]) -> set[Var]:
    """The needed values and all that they can be made from."""
    relevant = set(needed)
    for u, v in reversed(graph.edges):
        if v in relevant:
            relevant.add(u)
    return relevant


def _name(graph: Graph, chosen: Sequence[Var]) -> list[Saved]:
    """Names each chosen value after its root, or after itself where that name is taken."""
    saved: dict[str, Saved] = {}
    for var in chosen:
        value = graph.values[var]
        source = value
        if var not in graph.names and len(value.roots) == 1:
            (root,) = value.roots
            source = graph.values.get(root, value)
        name = graph.names.get(source.var, value.path)
        if name in saved:
            name, source = value.path, value
        count = itertools.count(1)
        while name in saved:
            name = f"{value.path}:{next(count)}"
        reason = source.pinned or "follows from several values"
        saved[name] = Saved(name, source.line, value, value.codec, value.exact, reason)
    return list(saved.values())


def _warn_of_unused_rules(graph: Graph, policy: Policy) -> None:
    for rule in policy.unused_rules(graph.candidates):
        names = list(dict.fromkeys(name for name, _, _ in graph.candidates))
        known = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"the rule for {rule.name!r} matches no residual of the function, whose values are "
            f"{known or 'all kept by reference'}",
            skip_file_prefixes=compat.LIBRARY_FOLDERS,
        )


def _apply(plan: Plan, saved: Sequence[Saved]) -> list[Saved]:
    """Stores each value as the plan says."""
    by_name = plan.codecs
    missing = [s.name for s in saved if not s.exact and s.name not in by_name]
    # What a loop's body saves is stored as the plan says by the body itself.
    unknown = sorted(set(by_name) - {s.name for s in saved} - {m.name for m in _loop_marks(saved)})
    if missing or unknown:
        parts = ["the plan was made for another function"]
        parts += [f"this one also saves {', '.join(missing)}"] if missing else []
        parts += [f"this one has no {', '.join(unknown)}"] if unknown else []
        raise ValueError("; ".join(parts))
    result = []
    for entry in saved:
        if entry.exact:
            result.append(entry)
            continue
        codec, exact = storage(by_name[entry.name], entry.value.aval)
        result.append(dataclasses.replace(entry, codec=codec, exact=exact))
    return result


def plan_of(saved: Sequence[Saved], policy: Policy | Plan) -> Plan:
    """The plan that a selection amounts to: its encoded values and their codecs."""
    basis = policy.basis if isinstance(policy, Plan) else policy
    entries = [(s.name, s.codec) for s in saved if not s.exact]
    entries += [(m.name, m.codec) for m in _loop_marks(saved) if not m.exact]
    return Plan(tuple(entries), basis)


def _loop_marks(saved: Sequence[Saved]) -> list[Mark]:
    """The marks on what the bodies of loops save, one for each residual."""
    found = {mark.name: mark for s in saved for mark in s.value.marks if mark.in_loop}
    return list(found.values())
