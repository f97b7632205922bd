"""What a controller did, step by step, and how that is written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jact.adapt.modes import Plans
from jact.memory.sizes import format_bytes
from jact.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptation:
    """One time that a controller measured, and what it made of that.

    Attributes:
        step: the step whose batch was measured last; steps count from 0.
        reason: "first", "confirm" (the first, with a second batch), "periodic", "asked" or "retry".
        switched: whether another plan was chosen.
        plan: the plan from then on.
        predicted_error: the relative error of the gradient, `|g - g0| / |g0|`, to expect of it.
        replaced_error: likewise, of the plan before it under the same measurement; None for the
            first.
        measured_error: likewise, as `Controller.measure` measured it; None where it did not.
        nbytes: bytes of all codes on the device.
        bits: average bits of an element; 4 is what the policy "int4" takes.
        peak: the compiled step's peak memory, in bytes; None where it was not compiled ahead.
        noise: variance that compression adds, relative to the variance of the gradient from batch
            to batch; None where there was one batch only.
        note: what else there is to say.
    """

    step: int
    reason: str
    switched: bool
    plan: Plan
    predicted_error: float
    replaced_error: float | None = None
    measured_error: float | None = None
    nbytes: int = 0
    bits: float = 0.0
    peak: int | None = None
    noise: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The record as JSON objects."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Adaptation:
        """The record that `to_json` wrote."""
        fields: dict[str, Any] = data | {"plan": Plan.from_json(data["plan"])}
        return cls(**fields)

    def __str__(self) -> str:
        """One line of a report."""
        codecs: dict[str, int] = {}
        for name in self.plan.bits.values():
            codecs[name] = codecs.get(name, 0) + 1
        parts = [
            f"step {self.step:>6} {self.reason:<9}",
            "new plan" if self.switched else "as before",
            f"error {self.predicted_error:.2e}",
            f"{self.bits:.2f} bits",
            format_bytes(self.nbytes),
            f"peak {'-' if self.peak is None else format_bytes(self.peak)}",
            ", ".join(f"{n} x {name}" for name, n in sorted(codecs.items())),
        ]
        return "  ".join(parts) + (f"  ({self.note})" if self.note else "")


def joined(plans: Plans) -> Plan:
    """Plans as one: that of the only function, or one whose names begin with the functions'."""
    if len(plans) == 1:
        return plans[0][1]
    # What tells apart functions of the same name in the same place is no pleasure to read.
    short = [place.partition("@")[0] for place, _ in plans]
    places = [s if short.count(s) == 1 else p for s, (p, _) in zip(short, plans, strict=True)]
    entries = [
        (f"{place}/{name}", codec)
        for place, (_, plan) in zip(places, plans, strict=True)
        for name, codec in plan.entries
    ]
    operations = [
        f"{place}/{name}"
        for place, (_, plan) in zip(places, plans, strict=True)
        for name in plan.operations or ()
    ]
    return Plan(tuple(entries), plans[0][1].basis, tuple(operations))


def metrics(history: Sequence[Adaptation], step: int, compilations: int) -> dict[str, float]:
    """Figures by name, as `jact.Controller.metrics` has them."""
    result = {
        "jact/step": float(step),
        "jact/adaptations": float(len(history)),
        "jact/switches": float(sum(a.switched for a in history)),
        "jact/compilations": float(compilations),
    }
    if history:
        last = history[-1]
        optional = {
            "jact/predicted_error": last.predicted_error,
            "jact/bits": last.bits,
            "jact/code_bytes": last.nbytes,
            "jact/measured_error": last.measured_error,
            "jact/peak_bytes": last.peak,
            "jact/noise": last.noise,
        }
        result |= {name: float(value) for name, value in optional.items() if value is not None}
    return result


def report(history: Sequence[Adaptation], heading: str) -> str:
    """A text about all adaptations, and the codecs of the last plan, residual by residual."""
    lines = [heading, *map(str, history)]
    if history:
        width = max((len(name) for name, _ in history[-1].plan.entries), default=0)
        lines.append("")
        lines += [f"{n:<{width}}  {c.name}" for n, c in history[-1].plan.entries]
    return "\n".join(lines)
