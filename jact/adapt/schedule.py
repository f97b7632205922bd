"""When a controller measures, and when it switches to another plan."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from jact import compat
from jact.adapt import decide
from jact.adapt.budget import Budget
from jact.adapt.decide import Decision
from jact.adapt.modes import Probing
from jact.adapt.state import Measuring, Pending, Progress
from jact.adapt.steps import Arguments, Program, Steps

logger = logging.getLogger("jact.adapt")

#: Batches that an adaptation measures as long as it is unknown how gradients differ from batch to
#: batch. The following ones measure a single batch.
_BATCHES = 2

#: Every so many adaptations biases are measured, which takes longer than the rest of a probe; the
#: others take them, relative to other errors, for what they were.
FULL_EVERY = 4

#: Measurements in a row that may come out as infinite or NaN before the next period is waited for.
_RETRIES = 5


@dataclasses.dataclass
class Schedule:
    """What is done before each step of a training, and how far that is.

    Attributes:
        budget: of the plans.
        every: steps between adaptations.
        switch_after: steps from a probe to the switch.
        min_gain: the part of the expected squared error that a new plan has to save.
        mode: how the step is probed.
        steps: the compiled steps that follow it; None before there is one to compile.
        at: where it is.
    """

    budget: Budget
    every: int
    switch_after: int
    min_gain: float
    mode: Probing
    steps: Steps | None = None
    at: Progress = dataclasses.field(default_factory=Progress)
    _executor: concurrent.futures.ThreadPoolExecutor | None = None

    def before(self, steps: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """Does whatever is due before the next step, and returns its program.

        Raises:
            ValueError: for the steps of a function that was defined anew.
        """
        if steps is not self.steps:
            raise ValueError(f"the controller follows a later definition of {steps.name}")
        if self.at.pending is not None and self.at.step >= self.at.pending.switch_at:
            self._settle()
        arguments = None
        if self.at.measuring is not None or self._is_due():
            arguments = Arguments(args, kwargs)
            if self._waits_for_another(arguments):
                self.at.waited += 1
            else:
                self._measure(steps, arguments, args, kwargs)
        elif self.at.pending is not None and self.at.pending.future is None:
            arguments = Arguments(args, kwargs)
            self._resume(steps, arguments)
        assert self.at.plans is not None
        program = steps.find(self.at.plans)
        if program is None:
            program = steps.get(self.at.plans, arguments or Arguments(args, kwargs))
        return program

    def _is_due(self) -> bool:
        if self.at.pending is not None:
            return False
        if self.at.plans is None:
            self.at.asked = "first"
        elif self.at.step % self.every == 0 and self.at.step > 0 and not self.at.asked:
            self.at.asked = "periodic"
        return bool(self.at.asked)

    def _waits_for_another(self, arguments: Arguments) -> bool:
        """Whether a later batch is better to measure; there may be none within a period.

        A smaller batch than the present plan was made for says less: some of its residuals are too
        small to be encoded, and its memory is no peak. Batches of other shapes have other errors.
        """
        if self.at.waited >= self.every:
            return False
        if (measuring := self.at.measuring) is None:
            return arguments.nbytes < self.at.nbytes
        return arguments.shapes != measuring.shapes and arguments.nbytes <= self.at.nbytes

    def _measure(self, steps: Steps, arguments: Arguments, args: Any, kwargs: Any) -> None:
        """Probes the step with its arguments, and decides once enough batches were measured."""
        measuring = self.at.measuring
        if measuring is None or measuring.shapes != arguments.shapes:
            reason = self.at.asked if measuring is None else measuring.reason
            full = self._measures_biases(reason, arguments)
            measuring = Measuring(reason, arguments.shapes, full)
        found, mode = steps.probe(self.mode, arguments, measuring.full, args, kwargs)
        measuring.add(found)
        self.at.asked, self.at.measuring = "", measuring
        self.at.waited, self.at.nbytes = 0, arguments.nbytes
        situation = decide.Situation(
            step=self.at.step,
            reason=measuring.reason,
            plans=self.at.plans,
            model=self.at.model,
            budget=self.budget,
            min_gain=self.min_gain,
            figures=measuring.figures,
            variances=self.at.variances,
            biases=None if measuring.full else self.at.biases,
            mode=mode,
        )
        if self.at.plans is None:
            self._take(decide.decide(situation, steps, arguments))
            if self.at.failures:
                self.at.measuring = None
            else:
                measuring.reason = "confirm"
        elif self.at.variances or measuring.batches >= _BATCHES:
            self.at.measuring = None
            work = functools.partial(decide.decide, situation, steps, arguments)
            self.at.pending = Pending(self.at.step + self.switch_after, self._start(work))

    def _measures_biases(self, reason: str, arguments: Arguments) -> bool:
        known = self.at.biases
        if reason != "periodic" or known is None or known.shapes != arguments.shapes:
            return True
        return known.uses + 1 >= FULL_EVERY

    def _start(self, work: Callable[[], Decision]) -> concurrent.futures.Future[Decision]:
        """Begins to work in the background, under the settings of this thread."""
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "jact-adapt")
        settings = compat.thread_settings()

        def run() -> Decision:
            with settings():
                return work()

        return self._executor.submit(run)

    def _resume(self, steps: Steps, arguments: Arguments) -> None:
        """Compiles in the background what had been decided when the state was saved."""
        assert self.at.pending is not None
        decision = self.at.pending.result()

        def compile_it() -> Decision:
            if decision.plans is not None and decision.switched:
                steps.get(decision.plans, arguments, self.at.plans).compile(arguments)
            return decision

        self.at.pending.future = self._start(compile_it)

    def _settle(self) -> None:
        """Takes what was decided in the background."""
        assert self.at.pending is not None
        pending, self.at.pending = self.at.pending, None
        if pending.future is not None and not pending.future.done():
            logger.info("step %d waits for the step under the new plan", self.at.step)
        try:
            decision = pending.result()
        except Exception:
            logger.exception("the adaptation before step %d failed; the plan stays", self.at.step)
            return
        self._take(decision)

    def _take(self, decision: Decision) -> None:
        self.at.model = decision.model or self.at.model
        if decision.plans:
            self.at.plans = decision.plans
        self.at.variances = self.at.variances | dict(decision.variances)
        self.at.biases = decision.biases or self.at.biases
        if decision.record is not None:
            self.at.history.append(decision.record)
            logger.info("%s", decision.record)
        self.at.failures = self.at.failures + 1 if decision.failed else 0
        if decision.failed and self.at.failures <= _RETRIES:
            self.at.asked = "retry"

    def present(self, args: Any, kwargs: Any) -> Program:
        """The program of the present plan; nothing is due before it.

        Raises:
            ValueError: when there is no plan yet.
        """
        if self.steps is None or self.at.plans is None:
            raise ValueError("there is no plan yet: run the first step, or restore a state")
        return self.steps.get(self.at.plans, Arguments(args, kwargs))
