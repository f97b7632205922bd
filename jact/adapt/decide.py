"""From the figures of a probe to the next plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jact.adapt.allocate import Allocation
from jact.adapt.biases import Biases
from jact.adapt.budget import Budget, Landscape, guessed
from jact.adapt.fit import Model, fit
from jact.adapt.history import Adaptation, joined
from jact.adapt.modes import Plans, Probing
from jact.adapt.sketch import spread
from jact.adapt.steps import Arguments, Steps
from jact.adapt.table import Sensitivities

logger = logging.getLogger("jact.adapt")

#: The variance of compression, relative to the gradient's own, above which training may suffer
#: (Liu et al., GACT, section 3.3).
NOISE = 0.1

#: The relative error of the gradient below which no training suffers, however little its batches
#: differ: where all of the data are one batch, its gradient has no variance to compare with.
HARMLESS_ERROR = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What a decision depends on.

    Attributes:
        step: the step of the last probe.
        reason: why there was one.
        plans: those in use; None before the first.
        model: what is known of peaks.
        budget: what may be spent.
        min_gain: the part of the squared error that a new plan has to save.
        figures: of the probes.
        variances: of the gradient from batch to batch, by place, as last measured.
        biases: as last measured; None where the probes measured them.
        mode: what the probes know of the functions.
    """

    step: int
    reason: str
    plans: Plans | None
    model: Model | None
    budget: Budget
    min_gain: float
    figures: Sequence[Mapping[str, Mapping[str, Any]]]
    variances: Mapping[str, float]
    biases: Biases | None
    mode: Probing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What comes of it.

    Attributes:
        plans: those to use from now on; None for those in use.
        record: for the history; None where nothing could be measured.
        model: what is known of peaks now; None for no more than before.
        variances: of the gradient from batch to batch, by place.
        biases: as last measured, for later decisions.
        failed: whether the figures were infinite or NaN.
    """

    plans: Plans | None
    record: Adaptation | None
    model: Model | None = None
    variances: Mapping[str, float] = dataclasses.field(default_factory=dict)
    biases: Biases | None = None
    failed: bool = False

    @property
    def switched(self) -> bool:
        """Whether there is something to compile."""
        return self.record is not None and self.record.switched


def decide(situation: Situation, steps: Steps, arguments: Arguments) -> Decision:
    """Finds the plan to go on with, and compiles the step for it.

    Args:
        situation: what is known.
        steps: compiles the step.
        arguments: what to compile it for.

    Raises:
        InfeasibleBudgetError: no choice of the candidates is within the budget.
        InfeasibleMemoryError: no plan's peak is.
        ValueError: when the step has no function that follows the controller.
    """
    figures = total(situation.figures)
    if not situation.mode.layouts:
        raise ValueError(
            f"{steps.fun.__name__} differentiates nothing whose policy is this controller: give it "
            "to jact.value_and_grad, jact.grad or jact.compress (policy=controller)"
        )
    if not all(np.isfinite(v).all() for found in figures.values() for v in found.values()):
        return _without_figures(situation, steps, arguments)
    if situation.biases is None:
        biases = Biases.measured(arguments.shapes, figures)
    else:
        figures = situation.biases.complete(figures)
        biases = situation.biases.used()
    landscape = survey(situation.mode, figures, situation.plans)
    chosen = _choose(situation, steps, arguments, landscape)
    variances = variances_of(situation, figures)
    noise = noise_of(landscape, chosen.choice, figures, variances)
    error = landscape.error_of(chosen.choice)
    if noise is not None and noise > NOISE and error > HARMLESS_ERROR:
        logger.warning(
            "at step %d compression adds %.2g times the variance that the gradient has from batch "
            "to batch, which is above %.2g, and %.2g of its norm, which may slow training down: "
            "raise the budget (%s)",
            situation.step,
            noise,
            NOISE,
            error,
            situation.budget,
        )
    decision = chosen.decision(situation, landscape, noise)
    return dataclasses.replace(decision, variances=variances, biases=biases)


def _without_figures(situation: Situation, steps: Steps, arguments: Arguments) -> Decision:
    """Where what was measured is infinite or NaN: the plan in use goes on, the first is a guess."""
    logger.warning(
        "what was measured at step %d holds infinite values or NaN; %s",
        situation.step,
        "the first plan is a guess" if situation.plans is None else "the plan stays",
    )
    if situation.plans is not None:
        return Decision(plans=None, record=None, failed=True)
    landscape = survey(situation.mode, None)
    decision = _choose(situation, steps, arguments, landscape).decision(situation, landscape, None)
    assert decision.record is not None
    record = dataclasses.replace(
        decision.record,
        predicted_error=float("nan"),
        note="a guess: nothing finite was measured",
    )
    return dataclasses.replace(decision, record=record, failed=True)


def total(figures: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, np.ndarray]]:
    """The sums of the figures of several probes, float64."""
    result: dict[str, dict[str, np.ndarray]] = {}
    for found in jax.device_get(list(figures)):
        for place, values in found.items():
            own = result.setdefault(place, {})
            for name, value in values.items():
                # In one order of memory, so that sums over it round alike after a resumption.
                own[name] = own.get(name, 0.0) + np.array(value, np.float64, order="C")
    return result


def measured_error(figures: Mapping[str, Mapping[str, Any]]) -> float:
    """The relative error `|g - g0| / |g0|`, of sketches of the coded and the exact gradients."""
    squares = [
        ((found["coded"] - found["exact"]) ** 2).sum() / (found["exact"] ** 2).sum()
        for found in total([figures]).values()
    ]
    return float(np.sqrt(np.mean(squares)))


def survey(
    mode: Probing,
    figures: Mapping[str, Mapping[str, np.ndarray]] | None,
    plans: Plans | None = None,
) -> Landscape:
    """The residuals of all functions with their errors, guessed where there are no figures.

    What plans in use say of residuals that were too small in this batch, new ones say as well.
    """
    places = sorted(mode.layouts)
    tables = [
        guessed(mode.layouts[place])
        if figures is None
        else Sensitivities.from_statistics(mode.layouts[place], figures[place])
        for place in places
    ]
    besides = {
        place: tuple(
            (name, codec)
            for name, codec in plan.entries
            if name in layout.known and name not in layout.names
        )
        for place, plan in plans or ()
        if (layout := mode.layouts.get(place)) is not None
    }
    return Landscape(
        places,
        tables,
        [mode.uniform[place] for place in places],
        [max(mode.calls.get(place, 1), 1) for place in places],
        besides,
    )


def variances_of(
    situation: Situation, figures: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, float]:
    """The gradient's variance from batch to batch, by place: as measured, or else as known."""
    measured = {place: spread(found) for place, found in figures.items()}
    return dict(situation.variances) | {p: v for p, v in measured.items() if v is not None}


def noise_of(
    landscape: Landscape,
    choice: Sequence[int],
    figures: Mapping[str, Mapping[str, np.ndarray]],
    variances: Mapping[str, float],
) -> float | None:
    """The variance that a choice adds, relative to the gradient's own; None where that is unknown.

    Of several functions, the largest counts.
    """
    ratios, rest = [], list(choice)
    for place, table in zip(landscape.places, landscape.tables, strict=True):
        own, rest = rest[: len(table.names)], rest[len(table.names) :]
        variance = table.error[np.arange(len(own)), own] - table.bias[np.arange(len(own)), own]
        own_variance = variances.get(place)
        if own_variance:
            ratios.append(float(variance.sum()) / float(figures[place]["count"]) / own_variance)
    return max(ratios, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chosen:
    """A choice, old or new."""

    choice: Sequence[int]
    plans: Plans | None
    peak: int | None
    model: Model | None
    replaced: Sequence[int] | None

    def decision(self, situation: Situation, landscape: Landscape, noise: float | None) -> Decision:
        plans = self.plans or situation.plans
        assert plans is not None
        replaced = None if self.replaced is None else landscape.error_of(self.replaced)
        record = Adaptation(
            step=situation.step,
            reason=situation.reason,
            switched=self.plans is not None,
            plan=joined(plans),
            predicted_error=landscape.error_of(self.choice),
            replaced_error=replaced,
            nbytes=landscape.nbytes_of(self.choice),
            bits=landscape.bits_of(self.choice),
            peak=self.peak,
            noise=noise,
        )
        return Decision(plans=self.plans, record=record, model=self.model)


def _choose(
    situation: Situation, steps: Steps, arguments: Arguments, landscape: Landscape
) -> _Chosen:
    """The plans in use if no others are clearly better, or else the best, compiled."""
    budget, model = situation.budget, situation.model
    old = None if situation.plans is None else landscape.choice(situation.plans)

    def is_clear(new: Allocation) -> bool:
        if old is None:
            return True
        present = landscape.error_of(old) ** 2
        return landscape.error_of(new.choice) ** 2 < (1 - situation.min_gain) * present

    def stay() -> _Chosen:
        assert situation.plans is not None and old is not None
        program = steps.find(situation.plans)
        peak = None if program is None else program.peak
        return _Chosen(choice=old, plans=None, peak=peak, model=model, replaced=old)

    def peak_of(new: Allocation) -> int:
        plans = landscape.plans(new.choice)
        return steps.get(plans, arguments, keep=situation.plans).compile(arguments)

    if budget.memory is None:
        new = landscape.allocate(budget.nbytes(landscape))
        if not is_clear(new):
            return stay()
        peak = peak_of(new)
    else:
        limit = int(budget.memory)
        if model is not None and not is_clear(landscape.allocate_for(model.nbytes(limit))):
            return stay()
        holds = lambda: steps.what_holds(situation.mode, arguments)  # noqa: E731
        found = fit(landscape, limit, peak_of, model, holds)
        new, peak, model = found.allocation, found.peak, found.model
        if not is_clear(new):
            return stay()
        # It may have been dropped while others were tried.
        peak_of(new)
    plans = landscape.plans(new.choice)
    return _Chosen(choice=new.choice, plans=plans, peak=peak, model=model, replaced=old)
