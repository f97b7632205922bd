"""Which values to save: a minimum cut before what the backward pass reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jact import codecs, compat
from jact.codecs import Codec
from jact.engine import costs
from jact.engine import graph as graphs
from jact.engine import program as programs
from jact.engine.directions import Directions, Found
from jact.engine.linearize import Linearized
from jact.engine.marks import ENCODE, Mark
from jact.engine.mincut import minimum_cut
from jact.engine.names import module_path, numbered
from jact.engine.origins import Input
from jact.engine.program import Var
from jact.engine.storage import storage
from jact.engine.values import Graph, Value
from jact.plan import Plan
from jact.policy import Policy

#: What a byte counts for in a value of pieces of different size. Those in one group would share a
#: range, and the smaller ones drown in its rounding; so their parts are saved where that will do.
_MIXED = 4

#: The same in a value whose error a singular function magnifies.
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
        name: its stable name: that of the expensive operation it follows from.
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
        held: values that follow from expensive operations that the backward pass runs again. It
            holds them in memory while it needs them, so that XLA does not keep what they were made
            from.
        made: values that expensive operations or encoded inputs stand behind.
        found: what the function holds, with all bodies inside of it.
    """

    saved: tuple[Saved, ...]
    held: frozenset[Var]
    made: frozenset[Var]
    found: Found


def select(linearized: Linearized, inputs: Sequence[Input], directions: Directions) -> Selection:
    """Chooses the values to save.

    Args:
        linearized: the function.
        inputs: what is known of its inputs.
        directions: how values are stored. A plan stores the values that its basis chooses. What is
            found is added to them.

    Returns:
        The cheapest set of values from which, and from the inputs kept by reference, every residual
        follows by cheap operations; and what to hold of what is made again.
    """
    graph, chosen = _choose_with_derivatives(linearized, inputs, directions)
    needed = _needed(graph, linearized)
    if all(isinstance(graph.values[v].codec, codecs.Keep) for v in chosen | needed):
        # Nothing would be smaller, so nothing is worth making again: save what JAX would.
        chosen = needed
    chosen = _before_arrangement(graph, linearized, chosen)
    saved = _name(graph, [v for v in graph.values if v in chosen])
    _note(directions.found, directions.scope, graph, linearized, saved)
    return Selection(
        tuple(_apply(directions, entry) for entry in saved),
        frozenset(_held(graph, linearized)),
        frozenset(graph.values),
        directions.found,
    )


def _choose_with_derivatives(
    linearized: Linearized, inputs: Sequence[Input], directions: Directions
) -> tuple[Graph, set[Var]]:
    """The graph and the variables to save, with derivatives or without as the policy says."""
    choices = []
    policy = directions.basis
    for derivatives in policy.derivative_choices:
        graph = graphs.build(linearized, inputs, policy, derivatives, directions.scope)
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
    """The least to hold of what expensive operations make again; statistics count for nothing.

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


def _note(
    found: Found, scope: str, graph: Graph, linearized: Linearized, saved: Sequence[Saved]
) -> None:
    """Adds what was found in a body."""
    paths = Counter(value.path for value in graph.values.values())
    expensive = Counter(
        f"{module_path(eqn)}{eqn.primitive.name}"
        for eqn in linearized.forward.eqns
        if costs.is_expensive(eqn)
    )
    # What encodes a value, in a compressed function inside, is there or not as sizes are.
    operations = [name for name in _all_numbered(expensive) if ENCODE not in name.split("/")]
    found.candidates.extend(graph.candidates)
    found.operations.update((scope + name, None) for name in operations)
    found.names.update(scope + name for name in (*graph.names.values(), *_all_numbered(paths)))
    found.names.update(scope + mark.name for mark in _loop_marks(saved))
    found.encoded.update((scope + s.name, None) for s in saved if not s.exact)
    if scope:
        found.inside.update(scope + s.name for s in saved)


def _all_numbered(counts: Counter[str]) -> Iterator[str]:
    return (numbered(base, i) for base, count in counts.items() for i in range(count))


def _apply(directions: Directions, entry: Saved) -> Saved:
    """The value as a plan stores it, if there is one that does."""
    codec = directions.planned(entry.name)
    if entry.exact or codec is None:
        return entry
    codec, exact = storage(codec, entry.value.aval)
    return dataclasses.replace(entry, codec=codec, exact=exact)


def plan_of(selection: Selection, policy: Policy | Plan) -> Plan:
    """The plan that a selection amounts to: its encoded values and their codecs."""
    basis = policy.basis if isinstance(policy, Plan) else policy
    entries = [(s.name, s.codec) for s in selection.saved if not s.exact]
    # A function inside that the user compressed has loops, too, and a policy of its own.
    marks = [m for m in _loop_marks(selection.saved) if m.name in selection.found.inside]
    entries += [(m.name, m.codec) for m in marks if not m.exact]
    return Plan(tuple(entries), basis, tuple(selection.found.operations))


def _loop_marks(saved: Sequence[Saved]) -> list[Mark]:
    """The marks on what the bodies of loops save, one for each residual."""
    found = {mark.name: mark for s in saved for mark in s.value.marks if mark.in_loop}
    return list(found.values())
