"""The backward pass: JAX's own, with residuals made from codes at the moment of need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from jact import codecs, compat
from jact.codecs.offload import on_device
from jact.engine import costs
from jact.engine import program as programs
from jact.engine.linearize import Linearized, is_differentiable
from jact.engine.marks import DECODE
from jact.engine.program import Atom, Equation, Var
from jact.engine.select import Saved, Selection

#: How many later values may be decoded before one that is not in use is forgotten, to be decoded
#: anew when needed.
_WINDOW = 2


@dataclasses.dataclass(frozen=True)
class Late:
    """A cotangent that is made when it is used.

    All cotangents from outside are there from the beginning, and nothing in a program, once XLA has
    removed the barriers, keeps it from using each of them at once. One that is made from what was
    computed before it cannot come early.

    Attributes:
        make: the cotangent, from a value that was computed before it, or None.
    """

    make: Callable[[Any], Any]


def inputs_read(linearized: Linearized, saved: Sequence[Saved]) -> list[int]:
    """Positions of the inputs that the backward pass reads by reference, given what is saved."""
    stored = {entry.var for entry in saved}
    producers = programs.Producers(linearized.forward.eqns)
    residuals = [a for a in linearized.residuals if compat.is_var(a)]
    _, leaves = producers.cone(residuals, stored.__contains__)
    read = set(leaves) - stored
    return [i for i, var in enumerate(linearized.forward.invars) if var in read]


def run_backward(
    linearized: Linearized,
    selection: Selection,
    inputs: Mapping[int, Any],
    codes: Sequence[Any],
    cotangents: Sequence[Any | Late],
    deviations: Mapping[Var, Callable[[], Any]] = MappingProxyType({}),
) -> list[Any]:
    """Computes the gradients.

    Args:
        linearized: the function.
        selection: what the forward pass saved, and what to hold in memory.
        inputs: the inputs that `inputs_read` names, by position.
        codes: one for each saved value.
        cotangents: one for each of `linearized.cotangents`.
        deviations: by their variables, what makes what is added to some saved values wherever they
            are read; called once, when a value is read first.

    Returns:
        One gradient for each of `linearized.differentiated`.
    """
    residuals = _Residuals(linearized, selection, inputs, codes, deviations)
    return _BackwardPass(linearized, residuals, cotangents).run()


class _BackwardPass:
    """The state of `run_backward`."""

    def __init__(
        self,
        linearized: Linearized,
        residuals: _Residuals,
        cotangents: Sequence[Any],
    ):
        self._program = linearized.backward
        self._eqns = programs.live_equations(self._program.eqns, self._program.outvars)
        self._residuals = residuals
        self._atoms = dict(zip(linearized.residual_inputs, linearized.residuals, strict=True))
        given = dict(zip(linearized.cotangent_inputs, cotangents, strict=True))
        self._late = {v: ct for v, ct in given.items() if isinstance(ct, Late)}
        there = {v: ct for v, ct in given.items() if v not in self._late}
        self._env = dict(self._program.consts) | there
        self._tokens = _tokens(self._eqns, linearized.cotangent_inputs)
        # Where an equation reads residuals alone, they wait for the cotangent that was used last.
        self._latest: list[Any] = list(there.values())[:1]
        # What came from outside is all there from the beginning. Of several cotangents that are,
        # each equation's could be used at once, so residuals also wait for what came out last.
        self._given = set(linearized.cotangent_inputs)
        self._previous: Any = None
        # The products that are larger than what they were made from.
        self._widened: set[Var] = set()
        # The gradients that no later decoding has waited for yet.
        self._unsettled = {
            v for v in self._program.outvars if compat.is_var(v) and v not in self._atoms
        }

    def run(self) -> list[Any]:
        outvars = self._program.outvars
        # What stands for a cotangent must outlive it, to be waited for in its place.
        keep = [*outvars, *(token for var, token in self._tokens.items() if token is not var)]
        programs.evaluate(self._eqns, self._env, keep=keep, before=self._fetch, after=self._forget)
        # A gradient may be a residual itself, as that of x in x * w is w where the cotangent is
        # one.
        direct = [v for v in outvars if compat.is_var(v) and v in self._atoms]
        values, _, _ = self._residuals.get([self._atoms[v] for v in direct], self._latest, ())
        self._env.update(zip(direct, values, strict=True))
        self._env.update((v, ct.make(self._previous)) for v, ct in self._late.items())
        return [programs.read(self._env, a) for a in outvars]

    def _fetch(self, eqn: Equation) -> None:
        """Puts the residuals that an equation reads into `env`, made after its cotangents."""
        operands = programs.operands(eqn)
        for var in operands:
            if var in self._late:
                self._env[var] = self._late.pop(var).make(self._previous)
        wanted = [v for v in operands if v in self._atoms]
        if not wanted:
            return
        waiting = list(dict.fromkeys(self._tokens[v] for v in operands if v in self._tokens))
        # Gradients that are ready wait as well: XLA would rather compute them last, and keep their
        # operands until then.
        ready = [v for v in self._env if v in self._unsettled and v not in waiting]
        before = [self._env[v] for v in ready]
        cotangents = [self._env[v] for v in waiting] or self._latest
        if waiting and len(self._given) > 1 and self._given.issuperset(waiting):
            cotangents += [] if self._previous is None else [self._previous]
        values, waited, gradients = self._residuals.get(
            [self._atoms[v] for v in wanted],
            cotangents,
            before,
            [self._env[v] for v in waiting if v in self._widened],
        )
        self._env.update(zip(wanted, values, strict=True))
        self._env.update(zip(waiting, waited[: len(waiting)], strict=True))
        self._env.update(zip(ready, gradients, strict=True))
        self._latest = waited[:1]
        # Once is enough: where nothing had to be decoded, nothing has waited.
        self._unsettled.difference_update(
            v for v, value in zip(ready, before, strict=True) if self._env[v] is not value
        )

    def _forget(self, eqn: Equation) -> None:
        for var in programs.operands(eqn):
            if var in self._atoms:
                self._env.pop(var, None)
        for var in eqn.outvars:
            if self._tokens.get(var) is var and is_differentiable(var.aval.dtype):
                self._previous = self._env[var]
        if _widens(eqn, self._tokens):
            self._widened.update(eqn.outvars)
            self._residuals.forget()


def _widens(eqn: Equation, tokens: Mapping[Var, Var]) -> bool:
    """Whether an equation is a product that is larger than the cotangent it is made from.

    What it is multiplied with next is as large: a network's widest arrays meet here. Made from
    values that were decoded before the product, those factors would lie next to it, and each
    other, and what was decoded; made from codes, they are made as they are used.
    """
    if eqn.primitive.name != "dot_general" or costs.is_batched_product(eqn):
        return False
    cotangents = [v.aval.size for v in programs.operands(eqn) if v in tokens]
    return bool(cotangents) and eqn.outvars[0].aval.size > max(cotangents)


def _tokens(eqns: Sequence[Equation], cotangents: Sequence[Var]) -> dict[Var, Var]:
    """For each value that depends on a cotangent, the value to wait for in its place.

    That is itself, or what it is a broadcast of: to wait for a value is to have it in memory, where
    a broadcast need not be.
    """
    tokens: dict[Var, Var] = {v: v for v in cotangents}
    for eqn in eqns:
        behind = [tokens[v] for v in programs.operands(eqn) if v in tokens]
        if behind:
            broadcast = eqn.primitive.name == "broadcast_in_dim"
            tokens.update((v, behind[0] if broadcast else v) for v in eqn.outvars)
    return tokens


class _Residuals:
    """Makes residuals from codes and from inputs, each at the moment it is asked for.

    A value that was made stays while it is in use, so that readers near each other share one
    decoding; between readers far apart it is forgotten.
    """

    def __init__(
        self,
        linearized: Linearized,
        selection: Selection,
        inputs: Mapping[int, Any],
        codes: Sequence[Any],
        deviations: Mapping[Var, Callable[[], Any]],
    ):
        self._deviations = {var: functools.cache(make) for var, make in deviations.items()}
        self._producers = programs.Producers(linearized.forward.eqns)
        self._held = selection.held
        by_reference = {linearized.forward.invars[i]: x for i, x in inputs.items()}
        self._inputs = dict(linearized.forward.consts) | by_reference
        saved = zip(selection.saved, codes, strict=True)
        self._saved = {entry.var: (entry, code) for entry, code in saved}
        # What is saved as it is can be read at any time.
        self._at_hand = self._inputs | {
            var: code
            for var, (entry, code) in self._saved.items()
            if isinstance(entry.codec, codecs.Keep)
        }
        self._made: dict[Var, Any] = {}
        self._last_use: dict[Var, int] = {}
        self._time = 0

    def get(
        self,
        wanted: Sequence[Atom],
        cotangents: Sequence[Any],
        gradients: Sequence[Any],
        products: Sequence[Any] = (),
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The values of residuals, made no earlier than the cotangents.

        Args:
            wanted: atoms of the forward program.
            cotangents: what the residuals are wanted for.
            gradients: what had better be computed before them.
            products: those of the cotangents that are products of matrices.

        Returns:
            The values, and the cotangents and the gradients again: those that readers must use from
            now on.
        """
        missing = [
            a for a in wanted if compat.is_var(a) and a not in self._at_hand and a not in self._made
        ]
        cotangents, gradients = list(cotangents), list(gradients)
        if missing:
            cotangents, gradients = self._make(missing, cotangents, gradients, products)
        for atom in wanted:
            if compat.is_var(atom):
                self._last_use[atom] = self._time
        values = [
            self._moved(a, self._at_hand[a])
            if compat.is_var(a) and a in self._at_hand
            else programs.read(self._made, a)
            for a in wanted
        ]
        self._forget_unused()
        return values, cotangents, gradients

    def forget(self) -> None:
        """Has everything decoded anew from now on."""
        self._made.clear()
        self._last_use.clear()

    def _make(
        self,
        wanted: Sequence[Var],
        cotangents: list[Any],
        gradients: list[Any],
        products: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        eqns, leaves = self._producers.cone(wanted, lambda v: v in self._made or v in self._saved)
        to_decode = [v for v in leaves if v in self._saved and v not in self._made]
        inputs = [v for v in leaves if v in self._inputs]
        # Weights, which several devices may have to gather before they use them; they do so once.
        weights = [v for v in inputs if is_differentiable(v.aval.dtype)]
        others = [v for v in inputs if v not in weights]
        codes = [self._fetched(v) for v in to_decode]
        # Without the barrier XLA would decode everything at once, when the backward pass begins, or
        # share the forward pass's own copy of what is made again, and keep it alive until here.
        # What is made of values that are there already has nothing to wait for, and a cotangent
        # that waits lies in memory, where inside of a fusion it need not.
        other_values, weight_values = ([self._inputs[v] for v in vs] for vs in (others, weights))
        if to_decode or inputs or gradients:
            (codes, other_values, cotangents), (weight_values, gradients) = compat.barrier(
                (codes, other_values, cotangents), (weight_values, gradients), products
            )
        env = {v: self._made[v] for v in leaves if v in self._made}
        env.update(zip([*others, *weights], [*other_values, *weight_values], strict=True))
        for var, code in zip(to_decode, codes, strict=True):
            entry, _ = self._saved[var]
            with compat.mesh_of(var.aval), jax.named_scope(f"{entry.name}/{DECODE}"):
                decoded = on_device(entry.codec).decode(code, var.aval.shape, var.aval.dtype)
                env[var] = self._moved(var, decoded)
            self._time += not isinstance(entry.codec, codecs.Keep | codecs.Mask)

        def hold(eqn: Equation) -> None:
            for var in eqn.outvars:
                if var in self._held:
                    env[var] = lax.optimization_barrier(env[var])

        results = [v for eqn in eqns for v in eqn.outvars]
        programs.evaluate(eqns, env, keep=results, after=hold)
        # What an expensive operation was run again from is decoded anew for its other readers: by
        # then much else may have come and gone.
        spent = set()
        if any(v in self._held for v in results):
            spent = {v for v in [*to_decode, *results] if v not in self._held and v not in wanted}
        for var in [*to_decode, *leaves, *results]:
            if var not in self._inputs and var not in spent:
                self._made[var] = env[var]
                self._last_use[var] = self._time
        return cotangents, gradients

    def _moved(self, var: Var, value: Any) -> Any:
        return value + self._deviations[var]() if var in self._deviations else value

    def _fetched(self, var: Var) -> Any:
        """The code of a saved value, on the device.

        Fetching does not wait for cotangents, so that it can overlap with what comes before.
        """
        entry, code = self._saved[var]
        return entry.codec.fetch(code) if isinstance(entry.codec, codecs.Offload) else code

    def _forget_unused(self) -> None:
        for var in [v for v in self._made if self._last_use[v] < self._time - _WINDOW]:
            del self._made[var], self._last_use[var]
