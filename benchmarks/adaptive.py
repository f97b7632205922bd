"""Adaptive plans next to uniform bits at the same average: errors, costs, and steps in a switch.

The error is |g - g0| / |g0| of a freshly initialised model, over all parameters, and is measured
on other batches than the plan was made from. The bound is the least ratio that a plan of the
candidates can have, by the sensitivities of one batch. The cost is that of adapting every 500
steps: a probe, and the compilation in the background, as if each adaptation brought a new plan.
With `--steps`, a few training steps are timed while another plan is compiled in the background and
then taken.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jact
import jact.memory
from benchmarks import output
from benchmarks.fidelity import arguments, flat_gradient, relative_error
from benchmarks.options import Case, differentiated, positive
from jact.adapt import defaults
from jact.adapt.allocate import allocate
from jact.adapt.schedule import FULL_EVERY
from jact.adapt.steps import Arguments

LINE = "bits"

COLUMNS: output.Columns = {
    "uniform": output.number("uniform_error", ".2e"),
    "adaptive": output.number("adaptive_error", ".2e"),
    "ratio": output.number("ratio", ".2f"),
    "bound": output.number("bound", ".2f"),
    "predicted": output.number("predicted_error", ".2e"),
    "predicted/measured": output.number("prediction", ".2f"),
    "bits": output.number("average_bits", ".2f"),
    "code MiB": output.mib("adaptive_bytes"),
    "uniform MiB": output.mib("uniform_bytes"),
    "probe/step": output.number("probe_steps", ".1f"),
    "full probe": output.number("full_probe_steps", ".1f"),
    "compile s": output.number("compile_seconds", ".1f"),
    "cost %": output.number("cost_percent", ".2f"),
    "longest step": output.number("longest_step", ".2f"),
    "plans": output.number("plans", "d"),
    "compilations": output.number("compilations", "d"),
}

EVERY = 500


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--bits", default="4,3,2", help="comma-separated averages")
    parser.add_argument("--codecs", help="comma-separated; None are the controller's own")
    parser.add_argument("--draws", type=positive, default=2, help="batches to measure errors on")
    parser.add_argument("--steps", type=int, default=0, help="training steps to time")
    parser.add_argument("--repeats", type=positive, default=3, help="of each timing")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each number of bits."""
    draws = [arguments(case, seed, "noise") for seed in range(1, chosen.draws + 1)]
    plain = jax.jit(case.gradient("off"))
    exact = [flat_gradient(plain, draw) for draw in draws]

    def error(policy: Any) -> float:
        loss = case.task("off").loss
        gradient = jax.jit(differentiated(loss, policy))
        pairs = zip(draws, exact, strict=True)
        errors = [relative_error(flat_gradient(gradient, draw), g) for draw, g in pairs]
        return float(np.sqrt(np.mean(np.square(errors))))

    for bits in map(int, chosen.bits.split(",")):
        output.announce(f"{case.model} with {bits} bits")
        candidates = chosen.codecs and chosen.codecs.split(",")
        run = Run(case, bits, candidates, chosen.repeats)
        plan = run.controller.current
        uniform = plan.replace(dict.fromkeys(plan.codecs, f"int{bits}"))
        uniform_error = error(uniform)
        adaptive_error = error(run.controller.plan)
        first = run.controller.history[0]
        timed = run.time_steps(chosen.steps) if chosen.steps else {}
        yield case.row(
            str(bits),
            jax.default_backend(),
            bits=str(bits),
            uniform_error=uniform_error,
            adaptive_error=adaptive_error,
            ratio=adaptive_error / uniform_error,
            bound=least_ratio(case, plan, bits, defaults.candidates(candidates, bits)),
            predicted_error=first.predicted_error,
            prediction=first.predicted_error / adaptive_error,
            average_bits=first.bits,
            adaptive_bytes=first.nbytes,
            uniform_bytes=saved_bytes(case, draws[0], uniform),
            **run.costs(),
            **({"longest_step": None, "plans": 1, "compilations": 1} | timed),
        )


def least_ratio(case: Case, plan: jact.Plan, bits: int, candidates: Sequence[Any]) -> float:
    """The least ratio of errors that a plan of the candidates can have, by their sensitivities."""
    options: dict[str, Any] = {"has_aux": True, "policy": plan.basis}
    codecs = [*candidates, f"int{bits}"]
    measure = jact.sensitivity(case.task("off").loss, codecs, **options)
    table = measure(*arguments(case, 0, "noise"))
    uniform = [codec.name for codec in table.codecs].index(f"int{bits}")
    budget = int(table.nbytes[:, uniform].sum())
    bound = allocate(table.error, table.nbytes, budget, method="greedy").bound
    return float(np.sqrt(bound / np.nansum(table.error[:, uniform])))


def saved_bytes(case: Case, draw: Any, plan: Any) -> int:
    """The bytes of the residuals that a plan is about."""
    loss = case.task("off").loss
    rows = jact.report(loss, plan, has_aux=True)(*draw).rows
    return sum(row.saved_bytes for row in rows if row.name in plan.codecs)


class Run:
    """A training step under a controller, after its first step."""

    def __init__(self, case: Case, bits: int, candidates: list[str] | None, repeats: int):
        self.case, self.repeats = case, repeats
        self.controller = controller = jact.Controller(bits=bits, codecs=candidates, every=EVERY)
        loss = case.task("off").loss

        def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            gradient = jact.value_and_grad(loss, has_aux=True, policy=controller)
            (_, state), grads = gradient(params, state, batch)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), state

        self.step = controller.jit(step)
        self.arguments = case.task("off").arguments(0)
        jax.block_until_ready(self.step(*self.arguments))

    def costs(self) -> dict[str, float]:
        """The seconds of a probe, of a step and of compiling one, and what adapting costs.

        Of so many probes, one measures biases, too.
        """
        controller, steps = self.controller, self.controller._schedule.steps
        program = steps.find(controller._schedule.at.plans)
        mode, types = controller._schedule.mode, Arguments(self.arguments, {})

        def probe_seconds(full: bool) -> float:
            return self._median(lambda: steps.probe(mode, types, full, self.arguments, {}))

        full, short = probe_seconds(True), probe_seconds(False)
        probe = (full + (FULL_EVERY - 1) * short) / FULL_EVERY
        step = self._median(lambda: program(*self.arguments))
        compiling = program.cpu_seconds
        cost = (probe + compiling / (os.cpu_count() or 1)) / (EVERY * step)
        return {
            "probe_seconds": probe,
            "step_seconds": step,
            "probe_steps": probe / step,
            "full_probe_steps": full / step,
            "compile_seconds": program.seconds,
            "cost_percent": 100 * cost,
        }

    def _median(self, run: Callable[[], Any]) -> float:
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def time_steps(self, number: int) -> dict[str, Any]:
        """The longest step from a probe to the switch, relative to the median; compilations.

        The other plan is the one in use with its first residual kept, so that it has to be
        compiled: in a thread, while steps are run. Then as many steps are run under it.
        """
        controller, steps = self.controller, self.controller._schedule.steps
        arguments = Arguments(self.arguments, {})
        program = steps.find(controller._schedule.at.plans)

        def seconds(program: Any) -> float:
            start = time.perf_counter()
            jax.block_until_ready(program(*self.arguments))
            return time.perf_counter() - start

        alone = [seconds(program) for _ in range(number)]
        (place, plan), *rest = controller._schedule.at.plans
        first = next(iter(plan.codecs))
        other = steps.get(((place, plan.replace({first: "keep"})), *rest), arguments)
        work = threading.Thread(target=other.compile, args=(arguments,))
        work.start()
        meanwhile = []
        while work.is_alive():
            meanwhile.append(seconds(program))
        after = [seconds(other) for _ in range(number)]
        median = statistics.median([*alone, *after])
        return {
            "longest_step": max([*meanwhile, *after]) / median,
            "longest_step_alone": max(alone) / median,
            "median_step_while_compiling": statistics.median(meanwhile or [median]) / median,
            "plans": len(steps),
            "compilations": steps.compilations,
        }
