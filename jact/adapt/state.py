"""What a controller is in the middle of, and how that is written down."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np

from jact.adapt.biases import Biases
from jact.adapt.decide import Decision, total
from jact.adapt.fit import Model
from jact.adapt.history import Adaptation
from jact.adapt.modes import Plans
from jact.plan import Plan


@dataclasses.dataclass
class Measuring:
    """The batches measured so far.

    Attributes:
        reason: why they are measured.
        shapes: `Arguments.shapes` of each.
        full: whether biases are measured, too.
        batches: how many there are.
        figures: of each probe; of those before the state was saved, their sums.
    """

    reason: str
    shapes: str
    full: bool = True
    batches: int = 0
    figures: list[Any] = dataclasses.field(default_factory=list)

    def add(self, figures: Any) -> None:
        """Takes one more batch."""
        self.figures = [*self.figures, figures]
        self.batches += 1

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON objects."""
        sums = total(self.figures)
        lists = {p: {k: v.tolist() for k, v in fs.items()} for p, fs in sums.items()}
        return {
            "reason": self.reason,
            "shapes": self.shapes,
            "full": self.full,
            "batches": self.batches,
            "figures": lists,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Measuring | None:
        """What `to_json` wrote."""
        if data is None:
            return None
        figures = {
            p: {k: np.asarray(v, np.float64) for k, v in fs.items()}
            for p, fs in data["figures"].items()
        }
        full = data.get("full", True)
        return cls(data["reason"], data.get("shapes", ""), full, data["batches"], [figures])


@dataclasses.dataclass
class Pending:
    """What is being decided, or was, and when it takes effect.

    Attributes:
        switch_at: the step that it takes effect before.
        future: what is being decided in the background; None after a state was restored.
        decision: what had been decided by then.
    """

    switch_at: int
    future: concurrent.futures.Future[Decision] | None
    decision: Decision | None = None

    def result(self) -> Decision:
        """The decision, waited for; raises what deciding has raised."""
        if self.future is not None:
            return self.future.result()
        assert self.decision is not None
        return self.decision

    def to_json(self) -> dict[str, Any] | None:
        """The decision, waited for, as JSON objects; None if there will be none."""
        try:
            decision = self.result()
        except Exception:
            return None  # It comes to nothing, and says so at its time.
        record = decision.record
        return {
            "switch_at": self.switch_at,
            "plans": plans_to_json(decision.plans),
            "model": None if decision.model is None else dataclasses.astuple(decision.model),
            "variances": dict(decision.variances),
            "biases": None if decision.biases is None else decision.biases.to_json(),
            "failed": decision.failed,
            "record": None if record is None else record.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Pending | None:
        """What `to_json` wrote."""
        if data is None:
            return None
        record = data["record"]
        decision = Decision(
            plans=plans_from_json(data["plans"]),
            record=None if record is None else Adaptation.from_json(record),
            model=None if data["model"] is None else Model(*data["model"]),
            variances=data["variances"],
            biases=Biases.from_json(data.get("biases")),
            failed=data["failed"],
        )
        return cls(data["switch_at"], None, decision)


@dataclasses.dataclass
class Progress:
    """Where a controller is: all that a resumed run needs.

    Attributes:
        step: how many steps were run.
        plans: those in use; None before the first.
        model: what is known of peaks.
        variances: of the gradient from batch to batch, by place.
        biases: as last measured; None if never.
        asked: why the next step is to be measured; empty if it is not.
        failures: measurements in a row that came out as infinite or NaN.
        nbytes: bytes of the arguments that were measured last.
        waited: for how many steps a batch to measure has been waited for.
        measuring: the batches measured so far for an adaptation that has begun.
        pending: the adaptation that is being decided, or has yet to take effect.
        history: a record of each adaptation.
    """

    step: int = 0
    plans: Plans | None = None
    model: Model | None = None
    variances: dict[str, float] = dataclasses.field(default_factory=dict)
    biases: Biases | None = None
    asked: str = ""
    failures: int = 0
    nbytes: int = 0
    waited: int = 0
    measuring: Measuring | None = None
    pending: Pending | None = None
    history: list[Adaptation] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON objects; what is being decided is waited for."""
        return {
            "step": self.step,
            "plans": plans_to_json(self.plans),
            "model": None if self.model is None else dataclasses.astuple(self.model),
            "variances": self.variances,
            "biases": None if self.biases is None else self.biases.to_json(),
            "asked": self.asked,
            "failures": self.failures,
            "nbytes": self.nbytes,
            "waited": self.waited,
            "measuring": None if self.measuring is None else self.measuring.to_json(),
            "pending": None if self.pending is None else self.pending.to_json(),
            "history": [a.to_json() for a in self.history],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Progress:
        """What `to_json` wrote."""
        return cls(
            step=data["step"],
            plans=plans_from_json(data["plans"]),
            model=None if data["model"] is None else Model(*data["model"]),
            variances=data["variances"],
            biases=Biases.from_json(data.get("biases")),
            asked=data["asked"],
            failures=data["failures"],
            nbytes=data.get("nbytes", 0),
            waited=data.get("waited", 0),
            measuring=Measuring.from_json(data["measuring"]),
            pending=Pending.from_json(data["pending"]),
            history=[Adaptation.from_json(a) for a in data["history"]],
        )


def plans_to_json(plans: Plans | None) -> Any:
    """Plans as JSON objects."""
    return None if plans is None else [[place, plan.to_json()] for place, plan in plans]


def plans_from_json(data: Any) -> Plans | None:
    """What `plans_to_json` wrote."""
    return None if data is None else tuple((place, Plan.from_json(p)) for place, p in data)
