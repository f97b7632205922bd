"""The values of a forward pass: their origins, their names, and how each would be stored.

A value is *made* when an expensive operation or an encoded input stands behind it; other values
follow cheaply from the arguments that are kept by reference anyway and are never saved. Some made
values are *pinned*: they are never made again from what was saved, so that they, or something that
follows from them, must be saved themselves.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jact import codecs, compat
from jact.codecs import Codec
from jact.engine import costs, derivatives, fills, marks, positive
from jact.engine import program as programs
from jact.engine.linearize import Linearized
from jact.engine.marks import Mark
from jact.engine.names import module_path, numbered
from jact.engine.origins import Input, Origin, origin_of_input, origin_of_result
from jact.engine.program import Atom, Equation, Var
from jact.engine.storage import (
    for_many_magnitudes,
    for_unlike_channels,
    mask_if_it_pays,
    raw_bytes,
    storage,
)
from jact.engine.values import Graph, Value
from jact.policy import Action, Policy


def build(
    linearized: Linearized,
    inputs: Sequence[Input],
    policy: Policy,
    derivatives: bool,
    scope: str = "",
) -> Graph:
    """Analyses a forward program.

    Args:
        linearized: the function.
        inputs: one for each of the forward program's inputs.
        policy: says how each value would be stored, and which expensive operations may run again.
        derivatives: whether residuals that follow nonlinearly from inexact values are pinned.
        scope: what stands before the names of values where the policy is asked about them.

    Returns:
        The graph of made values.
    """
    return _Builder(linearized, inputs, policy, derivatives, scope).build()


class _Builder:
    """The state of `build`."""

    def __init__(
        self,
        linearized: Linearized,
        inputs: Sequence[Input],
        policy: Policy,
        derivatives: bool,
        scope: str,
    ):
        self.program = linearized.forward
        self.inputs = inputs
        self.policy = policy
        self.scope = scope
        self.graph = Graph({}, {}, [], set(), [])
        self.origins: dict[Var, Origin | int] = {}
        self.counts: Counter[str] = Counter()
        # Values that follow cheaply from inputs which the backward pass gets inexactly: from which.
        self.inexact: dict[Var, frozenset[Var]] = {}
        # Nonlinear functions of what is stored inexactly.
        self.nonlinear: set[Var] = set()
        self.signs: dict[Var, positive.Sign] = {}
        self.divisors = linearized.divisors
        self.filled = fills.of_constants(self.program.consts)
        # Values with a saturating function between them and their roots; what singular functions
        # read; values of many magnitudes, in which singular functions result or begin.
        self.saturated: set[Var] = set()
        self.steep: set[Var] = set()
        self.of_many_magnitudes: set[Var] = set()
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
            if spec.filled:
                self.filled.add(var)
            if spec.encoded:
                self._add(var, spec.name, None, "an input", frozenset(), Origin.DATA)
        for eqn in self.program.eqns:
            fills.follow(eqn, self.filled, lambda v: not self._roots(v))
            positive.follow(eqn, self.signs)
            if eqn.primitive.name == "optimization_barrier":
                self._visit_identities(eqn)
            else:
                self._visit(eqn)
        self._find_steep()
        for var, value in self.graph.values.items():
            if value.codec == self.policy.default and not value.exact:
                self.graph.values[var] = self._suited(value)
        return self.graph

    def _suited(self, value: Value) -> Value:
        """A value that the policy stores by default, with what suits such values."""
        roots = {value.var} if value.pinned else value.roots
        codec, exact = value.codec, ""
        if value.var in self.filled or not self.of_many_magnitudes.isdisjoint(roots):
            codec, exact = storage(for_many_magnitudes(codec), value.aval)
        elif not self.over_batch.isdisjoint(roots):
            codec = for_unlike_channels(codec, value.aval.shape)
        return dataclasses.replace(value, codec=codec, exact=exact)

    def _find_steep(self) -> None:
        """Marks what singular functions read, back to what saturates."""
        for operand, result in reversed(self.graph.edges):
            if result in self.steep:
                self.steep.add(operand)
        for var in self.steep & self.saturated & self.graph.values.keys():
            self.graph.values[var] = dataclasses.replace(self.graph.values[var], steep=True)

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
        expensive = not (not made and costs.is_cheap_branch(eqn)) and self._is_expensive(eqn, base)
        origin = origin_of_result((self.origins[v] for v in operands), expensive)
        roots = frozenset().union(*map(self._roots, operands))
        # The statistics of scores that are computed again must be those of the scores as they come
        # out then: with the exact maximum and sum, the exponentials of a softmax need not be
        # bounded, nor add up to one.
        rerun = not expensive and (costs.is_expensive(eqn) or any(m.rerun for m in made))
        for position, out in enumerate(eqn.outvars):
            if compat.is_drop_var(out):
                continue
            self.origins[out] = origin
            if not expensive and not made and not (roots and costs.is_expensive(eqn)):
                self._visit_free(eqn, out, base, roots, origin)
                continue
            if found := marks.find(eqn, position):
                self._add_code(eqn, out, found)
                continue
            pinned = self._why_pinned(eqn, out, expensive, roots, rerun)
            self._follow_saturation(eqn, out, pinned)
            exact = "" if rerun else _why_exact(eqn)
            self._add(out, base, eqn.source_info, pinned, roots, origin, rerun, exact)
            if not pinned:
                if self._mixes(eqn, made):
                    value = self.graph.values[out]
                    self.graph.values[out] = dataclasses.replace(value, mixed=True)
                self.graph.edges.extend((m.var, out) for m in made)
                if costs.is_expensive(eqn):
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
            self._follow_saturation(eqn, out, pinned)
            exact = _why_exact(eqn)
            self._add(out, base, eqn.source_info, pinned, roots, origin, exact=exact)
        elif roots:
            self.inexact[out] = roots

    def _is_expensive(self, eqn: Equation, base: str) -> bool:
        if not costs.is_expensive(eqn):
            return False
        if eqn.effects or not eqn.outvars:
            return True
        aval = eqn.outvars[0].aval
        name = self._numbered(base)
        if self._action(name, aval) == "recompute":
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
        self, eqn: Equation, out: Var, expensive: bool, roots: frozenset[Var], rerun: bool
    ) -> str:
        if expensive:
            return "an expensive operation"
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
        if positive.is_singular(eqn, inexact, self.signs):
            return "a singular function"
        if self._is_divisor(out):
            return "a divisor of the backward pass"
        if tag := derivatives.tag(eqn):
            return f"the {tag} of a singular function"
        # Rounding about the border of a ReLU biases next to nothing, and its derivative is a mask.
        straight = costs.is_linear(eqn, inexact) or costs.is_piecewise_linear(eqn)
        if not straight or not self.nonlinear.isdisjoint(inexact):
            self.nonlinear.add(out)
            if out in self.derivatives and raw_bytes(out.aval) >= self.policy.min_bytes:
                return "a derivative"
        return ""

    def _follow_saturation(self, eqn: Equation, out: Var, pinned: str) -> None:
        """Notes where a function saturates, and where a singular one reads what is left then."""
        inexact = {v for v in programs.operands(eqn) if self._roots(v)}
        saturated = inexact & self.saturated
        # A quotient comes close to zero.
        falls = costs.singular_operand(eqn, inexact) is not None
        saturates = inexact and eqn.primitive.name in costs.SATURATING
        if not pinned and (saturated or saturates or falls):
            self.saturated.add(out)
        if pinned.endswith("a singular function") or (pinned and self._is_divisor(out)):
            self.of_many_magnitudes.add(out)
        operand = costs.singular_operand(eqn, saturated)
        if operand is None:
            return
        self.steep.add(operand)
        if positive.is_singular(eqn, saturated, self.signs):
            self.of_many_magnitudes |= self._roots(operand)

    def _is_divisor(self, var: Var) -> bool:
        """Whether the backward pass divides by a value that may be next to zero."""
        return var in self.divisors and self.signs.get(var) != positive.Sign.BOUNDED

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
        exact: str = "",
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
        codec: Codec = codecs.Keep()
        if not exact:
            codec, exact = self._storage(self._policy_name(name, roots, pinned), var.aval)
        elif var.aval.dtype == jnp.bool_:
            codec = mask_if_it_pays(var.aval)
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
            return mask_if_it_pays(aval), "a mask"
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            return codecs.Keep(), "not a float"
        # What is small in one batch may be large in the next.
        action = self._action(name, aval)
        if raw_bytes(aval) < self.policy.min_bytes:
            return codecs.Keep(), "small"
        return storage(action, aval)

    def _action(self, name: str, aval: Any) -> Action:
        """What the policy says of a value."""
        full = self.scope + name
        self.graph.candidates.append((full, aval.shape, aval.dtype))
        return self.policy.action(full, aval.shape, aval.dtype)

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


def _why_exact(eqn: Equation) -> str:
    """Why an equation's results are saved exactly whatever the policy; empty if they are not."""
    if costs.is_statistic(eqn):
        return "a statistic"
    return "a factor of a matrix" if eqn.primitive.name in costs.FACTORISATIONS else ""
