"""Which residuals a function has, and which codecs could store them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jact import codecs as registry
from jact.adapt.table import Layout
from jact.codecs import Codec
from jact.engine.instrumented import prepare_instrumented
from jact.engine.select import Saved, plan_of
from jact.engine.storage import storage
from jact.engine.trace import Traced
from jact.plan import Plan
from jact.policy import Policy


def candidates(codecs: Sequence[Codec | str]) -> tuple[Codec, ...]:
    """The codecs that were asked for, each once, after `Keep()`.

    Raises:
        TypeError: when `codecs` is no sequence of codecs and presets' names.
        ValueError: for an unknown name.
    """
    if isinstance(codecs, str) or not isinstance(codecs, Sequence):
        raise TypeError(f"codecs must be a sequence of codecs or names of presets, got {codecs!r}")
    return tuple(dict.fromkeys((registry.Keep(), *map(registry.resolve, codecs))))


def stores(codec: Codec, aval: Any) -> bool:
    """Whether a codec stores arrays of a type in a plan: it can, and they become smaller."""
    return isinstance(codec, registry.Keep) or not storage(codec, aval)[1]


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals that a policy encodes of a function, by name, in the order of its plan.

    Attributes:
        types: the type of each; in a loop, that of one iteration.
        times: how many iterations the loops around each have, all together.
        plan: the plan that the policy amounts to.
        known: names of residuals that the function may have at some size.
    """

    types: dict[str, Any]
    times: dict[str, int]
    plan: Plan
    known: frozenset[str]

    def layout(self, codecs: Sequence[Codec]) -> Layout:
        """The table of the residuals by some codecs."""
        shape = (len(self.types), len(codecs))
        nbytes, supported = np.zeros(shape, np.int64), np.zeros(shape, bool)
        raw = np.zeros(len(self.types), np.int64)
        for i, (name, aval) in enumerate(self.types.items()):
            raw[i] = self.times[name] * registry.Keep().nbytes(aval.shape, aval.dtype)
            for j, codec in enumerate(codecs):
                supported[i, j] = stores(codec, aval)
                nbytes[i, j] = raw[i]
                if supported[i, j]:
                    nbytes[i, j] = self.times[name] * codec.nbytes(aval.shape, aval.dtype)
        return Layout(
            tuple(self.types),
            tuple(codecs),
            nbytes,
            raw,
            supported,
            self.plan.basis,
            self.plan.operations,
            self.known,
        )

    def stored_with(self, codec: Codec) -> Plan:
        """The plan that stores all of them with one codec, or exactly where that cannot be."""
        entries = [
            (name, codec if stores(codec, aval) else registry.Keep())
            for name, aval in self.types.items()
        ]
        return Plan(tuple(entries), self.plan.basis, self.plan.operations)


class _Recorder:
    """An instrument that notes the types of what is saved."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}

    def replace(self, name: str, entry: Saved, value: Any, operands: Any) -> Any:
        del operands
        self.types[name] = entry.value.aval
        return value

    def deviates(self, name: str) -> bool:
        del name
        return False

    def deviate(self, name: str, entry: Saved, code: Any, operands: Any) -> None:
        del name, entry, code, operands


def find(traced: Traced, basis: Policy) -> Residuals:
    """The residuals of a traced function."""
    recorder = _Recorder()
    prepared = prepare_instrumented(
        traced.closed,
        traced.values,
        traced.inputs,
        traced.num_differentiated_outputs,
        basis,
        recorder,
        (),
    )
    plan = plan_of(prepared.selection, basis)
    sizes = {s.name: s.raw_bytes for s in prepared.saved}
    sizes |= {m.name: m.raw_bytes for s in prepared.saved for m in s.value.marks if m.in_loop}
    types = recorder.types | {s.name: s.value.aval for s in prepared.saved if not s.exact}
    times = {}
    for name in plan.codecs:
        aval = types[name]
        times[name] = sizes[name] // max(registry.Keep().nbytes(aval.shape, aval.dtype), 1)
    known = frozenset(prepared.selection.found.names)
    return Residuals({name: types[name] for name in plan.codecs}, times, plan, known)
