"""What the example programs share: options, the loop, checkpoints and a comparison at the end."""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import rich.console
import rich.progress
import rich.table

import jact

MIB = 2**20

#: `(train_state, batch) -> (train_state, loss)`, jitted; `train_state` is a pytree of arrays.
type Step = Callable[[Any, Any], tuple[Any, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What there is to train.

    Attributes:
        title: the model and the data, for people.
        init: makes the train state.
        make_step: makes the training step under a policy; "off" is plain JAX.
        batch: the batch of a step, by the step's number, so that a resumed run sees the same ones.
        evaluate: figures of a train state, on data that it was not trained on, by name.
    """

    title: str
    init: Callable[[], Any]
    make_step: Callable[[str], Any]
    batch: Callable[[int], Any]
    evaluate: Callable[[Any], dict[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run under one policy."""

    policy: str
    step: Step
    state: Any
    metrics: dict[str, float]
    peak_bytes: int
    compile_seconds: float


def parse(description: str | None, arguments: Sequence[str] | None, steps: int) -> Any:
    """Reads the command line; `steps` is the default number of training steps."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    add = parser.add_argument
    add("--policy", default="int4", choices=jact.presets.NAMES, metavar="NAME", help="see jact")
    add("--steps", type=int, default=steps, help=f"training steps ({steps})")
    add("--checkpoints", type=pathlib.Path, metavar="DIR", help="save here, and resume from here")
    add("--save-every", type=int, default=20, metavar="STEPS", help="steps between checkpoints")
    add("--log", type=pathlib.Path, metavar="FILE", help="append figures here, as lines of JSON")
    add(
        "--comparison",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train the same network in plain JAX, too",
    )
    return parser.parse_args(arguments)


def run(task: Task, options: Any) -> None:
    """Trains under the policy and, for comparison, in plain JAX, and prints a table."""
    try:
        _run(task, options)
    except KeyboardInterrupt:
        if options.checkpoints is None:
            words = "Nothing was saved: give --checkpoints DIR, and a run can be resumed."
        else:
            words = "The same command again resumes from the last checkpoint."
        print(f"\nStopped. {words}", file=sys.stderr)
        sys.exit(130)


def _run(task: Task, options: Any) -> None:
    console = rich.console.Console()
    policies = [options.policy, "off"] if options.comparison else [options.policy]
    runs = [train(task, policy, options, console) for policy in dict.fromkeys(policies)]
    rows = [
        {
            "policy": run.policy,
            **run.metrics,
            "peak MiB": run.peak_bytes / MIB,
            "seconds per step": seconds,
            "seconds to compile": run.compile_seconds,
        }
        for run, seconds in zip(runs, time_steps(runs, task.batch(0)), strict=True)
    ]
    table = rich.table.Table(title=task.title)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()))
        log(options, row)
    console.print(table)


def train(task: Task, policy: str, options: Any, console: rich.console.Console) -> Run:
    """Trains under one policy, from the last checkpoint if there is one."""
    state, first = task.init(), 0
    manager = None
    if options.checkpoints is not None:
        manager = ocp.CheckpointManager(
            (options.checkpoints / policy).absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, save_interval_steps=options.save_every
            ),
        )
        if (latest := manager.latest_step()) is not None:
            state = manager.restore(latest, args=ocp.args.StandardRestore(state))
            first = latest
        unlog(options, policy, first)

    try:
        return _train(task, policy, options, console, manager, state, first)
    finally:
        # Checkpoints are written in the background.
        if manager is not None:
            manager.close()


def _train(
    task: Task,
    policy: str,
    options: Any,
    console: rich.console.Console,
    manager: ocp.CheckpointManager | None,
    state: Any,
    first: int,
) -> Run:
    begin = time.perf_counter()
    step = task.make_step(policy).lower(state, task.batch(first)).compile()
    compile_seconds = time.perf_counter() - begin

    columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[shown]}")
    with rich.progress.Progress(*columns, console=console) as progress:
        bar = progress.add_task(policy, total=options.steps, completed=first, shown="")
        for number in range(first, options.steps):
            state, loss = step(state, task.batch(number))
            log(options, {"policy": policy, "step": number, "loss": float(loss)})
            progress.update(bar, advance=1, shown=f"loss {float(loss):.3f}")
            if manager is not None:
                # It decides by the step whether to save, and does so in the background.
                manager.save(
                    number + 1,
                    args=ocp.args.StandardSave(state),
                    force=number + 1 == options.steps,
                )
        metrics = task.evaluate(state)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        progress.update(bar, shown=shown)
    return Run(
        policy=policy,
        step=step,
        state=state,
        metrics=metrics,
        peak_bytes=step.memory_analysis().temp_size_in_bytes,
        compile_seconds=compile_seconds,
    )


def time_steps(runs: Sequence[Run], batch: Any, rounds: int = 5) -> list[float]:
    """The median seconds of each run's step, in turns, so that the machine treats all alike."""
    seconds: list[list[float]] = [[] for _ in runs]
    states = [run.state for run in runs]
    for _ in range(rounds):
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            states[i], _ = jax.block_until_ready(run.step(states[i], batch))
            seconds[i].append(time.perf_counter() - begin)
    return [statistics.median(s) for s in seconds]


def log(options: Any, figures: dict[str, Any]) -> None:
    """Appends figures to the log, if there is one."""
    if options.log is not None:
        with options.log.open("a") as file:
            file.write(json.dumps(figures) + "\n")


def unlog(options: Any, policy: str, first: int) -> None:
    """Takes back what was logged of steps that come after a checkpoint, as they are run again."""
    if options.log is not None and options.log.exists():
        lines = options.log.read_text().splitlines(keepends=True)
        logged = [json.loads(line) for line in lines]
        again = [x["policy"] == policy and x.get("step", -1) >= first for x in logged]
        options.log.write_text("".join(x for x, a in zip(lines, again, strict=True) if not a))
