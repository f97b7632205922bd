"""The values of a forward pass: their origins, their names, and how each would be stored.

A value is *made* when a dear operation or an encoded input stands behind it; other values follow
cheaply from the arguments that are kept by reference anyway and are never saved. Some made values
are *pinned*: they are never made again from what was saved, so that they, or something that follows
from them, must be saved themselves.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jact import codecs, compat
from jact.codecs import Codec
from jact.engine import costs, derivatives, marks
from jact.engine import program as programs
from jact.engine.linearize import Linearized
from jact.engine.marks import Mark
from jact.engine.origins import Input, Origin, origin_of_input, origin_of_result
from jact.engine.program import Atom, Equation, Var
from jact.policy import Action, Policy


@dataclasses.dataclass(frozen=True)
class Value:
    """One made value of the forward pass.

    Attributes:
        var: its variable in the forward program.
        path: module path and primitive of the equation that made it.
        source: where the equation that made it comes from; None for an input.
        pinned: why it is never made again from saved values; empty when it may be.
        roots: the pinned, inexactly stored values that it would be made from.
        exact: why it would be saved exactly; empty when a codec would store it.
        codec: what would store it.
        origin: see `Origin`; otherwise the argument of `Input.argument`.
        rerun: whether a dear operation that is run again stands between it and its roots.
        mixed: whether it is put together of inexact and exact pieces (a class token before patches,
            zeros around an image) and so may hold parts of very different size.
        marks: of what it is a code, when a compressed function inside of this one made it.
    """

    var: Var
    path: str
    source: Any
    pinned: str
    roots: frozenset[Var]
    exact: str
    codec: Codec
    origin: Origin | int
    rerun: bool
    mixed: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def aval(self) -> Any:
        """The type of the value."""
        return self.var.aval

    @property
    def line(self) -> str:
        """The user's line that made it; looked up when asked for, as few values are saved."""
        if self.marks:
            return self.marks[0].line
        return compat.source_line(self.source) if self.source is not None else ""

    @property
    def raw_bytes(self) -> int:
        """Bytes of the value itself."""
        return raw_bytes(self.aval)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its code."""
        return self.codec.nbytes(self.aval.shape, self.aval.dtype)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The made values of a function's forward pass.

    Attributes:
        values: by variable, in the order in which they are made.
        names: the names of the pinned values.
        edges: pairs (operand, result) of made values where the result is cheap to make again from
            the operands.
        rerun: results of dear operations that are run again.
        candidates: name, shape and dtype of all that the policy was asked about.
    """

    values: dict[Var, Value]
    names: dict[Var, str]
    edges: list[tuple[Var, Var]]
    rerun: set[Var]
    candidates: list[tuple[str, tuple[int, ...], Any]]


def raw_bytes(aval: Any) -> int:
    """Bytes of an array of a type, as XLA stores it."""
    return codecs.Keep().nbytes(aval.shape, aval.dtype)


def build(
    linearized: Linearized, inputs: Sequence[Input], policy: Policy, derivatives: bool
) -> Graph:
    """Analyses a forward program.

    Args:
        linearized: the function.
        inputs: one for each of the forward program's inputs.
        policy: says how each value would be stored, and which dear operations may be run again.
        derivatives: whether residuals that follow nonlinearly from inexact values are pinned.

    Returns:
        The graph of made values.
    """
    return _Builder(linearized, inputs, policy, derivatives).build()


class _Builder:
    """The state of `build`."""

    def __init__(
        self,
        linearized: Linearized,
        inputs: Sequence[Input],
        policy: Policy,
        derivatives: bool,
    ):
        self.program = linearized.forward
        self.inputs = inputs
        self.policy = policy
        self.graph = Graph({}, {}, [], set(), [])
        self.origins: dict[Var, Origin | int] = {}
        self.counts: Counter[str] = Counter()
        # Values that follow cheaply from inputs which the backward pass gets inexactly: from which.
        self.inexact: dict[Var, frozenset[Var]] = {}
        # Nonlinear functions of what is stored inexactly.
        self.nonlinear: set[Var] = set()
        # Inexactly stored values whose statistics are taken over the batch, channel by channel.
        self.over_batch: set[Var] = set()
        residuals = {a for a in linearized.residuals if compat.is_var(a)}
        self.derivatives = residuals if derivatives else set()

    def build(self) -> Graph:
        self.origins.update(dict.fromkeys(self.program.consts, Origin.DATA))
        for var, spec in zip(self.program.invars, self.inputs, strict=True):
            self.origins[var] = origin_of_input(spec)
            if spec.inexact and not spec.encoded:
                self.inexact[var] = frozenset({var})
            if spec.encoded:
                self._add(var, spec.name, None, "an input", frozenset(), Origin.DATA)
        for eqn in self.program.eqns:
            if eqn.primitive.name == "optimization_barrier":
                self._visit_identities(eqn)
            else:
                self._visit(eqn)
        for var, value in self.graph.values.items():
            over_batch = self.over_batch & ({var} if value.pinned else value.roots)
            codec = value.codec
            by_default = codec == self.policy.default and not value.exact
            if over_batch and by_default and isinstance(codec, codecs.Quantize):
                codec = codec.for_unlike_channels(value.aval.shape)
                self.graph.values[var] = dataclasses.replace(value, codec=codec)
        return self.graph

    def _visit_identities(self, eqn: Equation) -> None:
        """A barrier's results are its operands, one by one."""
        for operand, out in zip(eqn.invars, eqn.outvars, strict=True):
            if not compat.is_var(operand):
                self.origins[out] = Origin.GENERATED
                continue
            self.origins[out] = self.origins[operand]
            if operand in self.inexact:
                self.inexact[out] = self.inexact[operand]
            if operand in self.nonlinear:
                self.nonlinear.add(out)
            if (made := self.graph.values.get(operand)) is not None:
                self.graph.values[out] = dataclasses.replace(made, var=out, pinned="")
                self.graph.edges.append((operand, out))

    def _visit(self, eqn: Equation) -> None:
        operands = programs.operands(eqn)
        made = [self.graph.values[v] for v in operands if v in self.graph.values]
        base = f"{module_path(eqn)}{derivatives.tag(eqn) or eqn.primitive.name}"
        # A branch is pinned lest it be chosen by inexact values; of free ones it is free.
        dear = not (not made and costs.is_cheap_branch(eqn)) and self._is_dear(eqn, base)
        origin = origin_of_result((self.origins[v] for v in operands), dear)
        roots = frozenset().union(*map(self._roots, operands))
        # The statistics of scores that are computed again must be those of the scores as they come
        # out then: with the exact maximum and sum, the exponentials of a softmax need not be
        # bounded, nor add up to one.
        rerun = not dear and (costs.is_dear(eqn) or any(m.rerun for m in made))
        for position, out in enumerate(eqn.outvars):
            if compat.is_drop_var(out):
                continue
            self.origins[out] = origin
            if not dear and not made and not (roots and costs.is_dear(eqn)):
                self._visit_free(eqn, out, base, roots, origin)
                continue
            if found := marks.find(eqn, position):
                self._add_code(eqn, out, found)
                continue
            pinned = self._why_pinned(eqn, out, dear, roots, rerun)
            statistic = costs.is_statistic(eqn) and not rerun
            self._add(out, base, eqn.source_info, pinned, roots, origin, rerun, statistic)
            if not pinned:
                if self._mixes(eqn, made):
                    value = self.graph.values[out]
                    self.graph.values[out] = dataclasses.replace(value, mixed=True)
                self.graph.edges.extend((m.var, out) for m in made)
                if costs.is_dear(eqn):
                    self.graph.rerun.add(out)
        if costs.sums_over_batch(eqn):
            self.over_batch |= roots
        if eqn.primitive.name == "name" and not derivatives.tag(eqn) and not marks.read(eqn):
            self._tag(eqn, roots)

    def _visit_free(
        self, eqn: Equation, out: Var, base: str, roots: frozenset[Var], origin: Origin | int
    ) -> None:
        """A value that follows cheaply from inputs alone; they may come back inexactly."""
        if pinned := self._why_pinned(eqn, out, False, roots, False):
            statistic = costs.is_statistic(eqn)
            self._add(out, base, eqn.source_info, pinned, roots, origin, statistic=statistic)
        elif roots:
            self.inexact[out] = roots

    def _is_dear(self, eqn: Equation, base: str) -> bool:
        if not costs.is_dear(eqn):
            return False
        if eqn.effects or not eqn.outvars:
            return True
        aval = eqn.outvars[0].aval
        name = self._numbered(base)
        self.graph.candidates.append((name, aval.shape, aval.dtype))
        if self.policy.action(name, aval.shape, aval.dtype) == "recompute":
            self.counts[base] += 1
            return False
        # Scores are cheap next to what saving them costs; a product with weights is not.
        scores = costs.is_batched_product(eqn) and all(map(self._roots, eqn.invars))
        return not scores

    def _roots(self, atom: Atom) -> frozenset[Var]:
        """What inexactly stored values a reader of a value would depend on."""
        if not compat.is_var(atom):
            return frozenset()
        if (value := self.graph.values.get(atom)) is None:
            return self.inexact.get(atom, frozenset())
        if value.pinned:
            return frozenset() if value.exact else frozenset({value.var})
        return value.roots

    def _why_pinned(
        self, eqn: Equation, out: Var, dear: bool, roots: frozenset[Var], rerun: bool
    ) -> str:
        if dear:
            return "a dear operation"
        if not roots:
            return ""
        steps = eqn.primitive.name in costs.STEPS
        if steps or not jnp.issubdtype(out.aval.dtype, jnp.inexact):
            return "a discrete value"
        if costs.is_statistic(eqn) and not rerun:
            return "a statistic"
        # Scores that are larger than what they are made of are made again, biases and all.
        largest_root = max(v.aval.size for v in roots)
        if rerun and out.aval.size > largest_root:
            return ""
        if eqn.primitive.name in costs.JOINS and self._joins_streams(eqn, out):
            return "a sum of streams"
        if rerun:
            return ""
        inexact = {v for v in programs.operands(eqn) if self._roots(v)}
        if costs.is_singular(eqn, inexact):
            return "a singular function"
        if tag := derivatives.tag(eqn):
            return f"the {tag} of a singular function"
        # Rounding about the border of a ReLU biases next to nothing, and its derivative is a mask.
        straight = costs.is_linear(eqn, inexact) or costs.is_piecewise_linear(eqn)
        if not straight or not self.nonlinear.isdisjoint(inexact):
            self.nonlinear.add(out)
            if out in self.derivatives and raw_bytes(out.aval) >= self.policy.min_bytes:
                return "a derivative"
        return ""

    def _mixes(self, eqn: Equation, made: Sequence[Value]) -> bool:
        """Whether a result is put together of inexact and exact pieces, or follows from one."""
        if any(m.mixed for m in made):
            return True
        if eqn.primitive.name not in costs.ASSEMBLING:
            return False
        # Indices are no pieces.
        pieces = [a for a in eqn.invars if a.aval.dtype == eqn.outvars[0].aval.dtype]
        return len({bool(self._roots(piece)) for piece in pieces}) == 2

    def _joins_streams(self, eqn: Equation, out: Var) -> bool:
        parts = [
            self._roots(v)
            for v in eqn.invars
            if compat.is_var(v) and v in self.graph.values and v.aval.shape == out.aval.shape
        ]
        return len(parts) == 2 and bool(parts[0] - parts[1]) and bool(parts[1] - parts[0])

    def _add(
        self,
        var: Var,
        base: str,
        source: Any,
        pinned: str,
        roots: frozenset[Var],
        origin: Origin | int,
        rerun: bool = False,
        statistic: bool = False,
    ) -> None:
        name = base
        if pinned:
            name = self._numbered(base)
            self.counts[base] += 1
            self.graph.names[var] = name
        if not pinned and not roots:
            exact = "follows from exact values"
        elif pinned != "an input" and isinstance(origin, int):
            exact = "made of weights alone"
        elif statistic:
            exact = "a statistic"
        else:
            exact = ""
        codec: Codec = codecs.Keep()
        if not exact:
            codec, exact = self._storage(self._policy_name(name, roots, pinned), var.aval)
        elif var.aval.dtype == jnp.bool_:
            codec = _mask_if_it_pays(var.aval)
        self.graph.values[var] = Value(
            var, base, source, pinned, roots, exact, codec, origin, rerun
        )

    def _add_code(self, eqn: Equation, var: Var, found: tuple[Mark, ...]) -> None:
        """Adds what a compressed function inside of this one saves; it stays as it is."""
        mark = found[0]
        path = mark.name if mark.in_loop else f"{module_path(eqn)}{mark.name}"
        self.graph.names[var] = self._numbered(path)
        self.counts[path] += 1
        self.graph.values[var] = Value(
            var=var,
            path=path,
            source=eqn.source_info,
            pinned=mark.reason,
            roots=frozenset(),
            exact="a code",
            codec=codecs.Keep(),
            origin=Origin.DATA,
            rerun=False,
            marks=found,
        )

    def _policy_name(self, name: str, roots: frozenset[Var], pinned: str) -> str:
        """A value that follows from one root goes by its name, which is the more stable one."""
        if not pinned and len(roots) == 1:
            return self.graph.names.get(next(iter(roots)), name)
        return name

    def _storage(self, name: str, aval: Any) -> tuple[Codec, str]:
        """How the policy stores a value, and why exactly if it does."""
        if aval.dtype == jnp.bool_:
            return _mask_if_it_pays(aval), "a mask"
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return codecs.Keep(), "not a float"
        size = raw_bytes(aval)
        if size < self.policy.min_bytes:
            return codecs.Keep(), "small"
        self.graph.candidates.append((name, aval.shape, aval.dtype))
        return storage(self.policy.action(name, aval.shape, aval.dtype), aval)

    def _numbered(self, base: str) -> str:
        return numbered(base, self.counts[base])

    def _tag(self, eqn: Equation, roots: frozenset[Var]) -> None:
        """`checkpoint_name` names the value that its operand follows from."""
        if len(roots) != 1 or not roots <= self.graph.values.keys():
            return
        (root,) = roots
        tag = f"{module_path(eqn)}{eqn.params['name']}"
        name = self._numbered(tag)
        self.counts[tag] += 1
        self.graph.names[root] = name
        for var in (root, *eqn.outvars):
            value = self.graph.values[var]
            if not value.exact or value.exact == "the policy keeps it":
                codec, exact = self._storage(name, value.aval)
                self.graph.values[var] = dataclasses.replace(value, codec=codec, exact=exact)


def numbered(base: str, count: int) -> str:
    """The name of what comes after `count` others of the same base name."""
    return f"{base}:{count}" if count else base


def storage(action: Action, aval: Any) -> tuple[Codec, str]:
    """The codec that an action asks for, or why the value stays exact all the same."""
    if isinstance(action, str):
        return codecs.Keep(), "the policy keeps it"
    if not action.supports(aval.shape, aval.dtype):
        return codecs.Keep(), f"{action.name} does not store such arrays"
    # In host memory an array as large as before is a gain for the device.
    offloaded = isinstance(action, codecs.Offload)
    if action.nbytes(aval.shape, aval.dtype) >= raw_bytes(aval) and not offloaded:
        return codecs.Keep(), f"{action.name} would not be smaller"
    return action, ""


def _mask_if_it_pays(aval: Any) -> Codec:
    mask = codecs.Mask()
    return mask if mask.nbytes(aval.shape, aval.dtype) < math.prod(aval.shape) else codecs.Keep()


def module_path(eqn: Equation) -> str:
    """The name scopes of an equation, without JAX's transformations; empty or ending in a slash."""
    return scope_path(compat.name_scopes(eqn.source_info))


def scope_path(scopes: str) -> str:
    """A name stack without JAX's transformations; empty or ending in a slash."""
    # "transpose(jvp(Model))/Block_0" and "jvp()/Block_0" both lose their wrappers.
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", scopes)) != scopes:
        scopes = plain
    return "".join(part + "/" for part in scopes.split("/") if part)
