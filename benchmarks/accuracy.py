"""Accuracy after training under each policy: five small models, three seeds, mean and error.

Each training that ends is a line in the file of results, and is not run again: a run that was
stopped goes on where it was. Runs of one seed share parameters, order of examples and (for graphs)
the labels that are seen, so differences to plain JAX are taken seed by seed.

Pooled codecs are for feature maps. Under `pool2`, `pool4` and `hybrid2` a model without
convolutions is stored by the codec of everything else (int8, int2, int2), so they are left out
there. `pool2-tokens` averages two tokens that follow each other instead.

`adaptive3-derivatives` is for models with GELU: its derivatives are saved rather than its
arguments, whose rounding at 2 bits biases the gradient.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.progress

import jact
import jact.presets
from benchmarks import accuracy_table, options, output
from benchmarks.data import MissingDataError
from benchmarks.experiments import EXPERIMENTS, Experiment
from benchmarks.training import Adaptive, Trainer
from jact.codecs import Pool

TOKENS = jact.Policy(
    rules=(jact.Rule("*", Pool(window=2), rank=3, required=False),), default="int8"
)
"""Pairs of tokens are averaged in `[batch, length, channels]`; everything else is in 8 bits."""

POLICIES: dict[str, Any] = {
    **{name: name for name in ("off", "int8", "int4", "int2")},
    **{name: name for name in ("hybrid2", "pool2", "pool4")},
    "pool2-tokens": TOKENS,
    **{f"adaptive{bits}": Adaptive(bits) for bits in (4, 3, 2)},
    "adaptive3-derivatives": Adaptive(3, jact.Policy(default="int4", derivatives=True)),
    "blpa-4": "blpa-4",
}
"""Names of the table, and what `Trainer` takes."""

RESULTS = pathlib.Path(__file__).parent / "results" / "accuracy.jsonl"

COLUMNS: output.Columns = {
    "seeds": output.number("seeds", "d"),
    "accuracy %": output.number("mean", ".2f"),
    "± s.e.": output.number("error", ".2f"),
    "- plain": output.number("difference", "+.2f"),
    "± s.e. ": output.number("difference_error", ".2f"),
    "CPU s": output.number("seconds", ".0f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    choose = options.names("task", EXPERIMENTS)
    parser.add_argument("--tasks", type=choose, default=",".join(EXPERIMENTS), help="which ones")
    parser.add_argument(
        "--policies", type=options.names("policy", POLICIES), default=",".join(POLICIES)
    )
    parser.add_argument("--seeds", type=options.positive, default=3, help="trainings of each")
    parser.add_argument("--steps", type=options.positive, help="of each; None is the task's own")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="a line for each run")
    parser.add_argument("--only-show", action="store_true", help="run nothing")
    parser.add_argument("--plot", metavar="FILE", help="where to draw the differences")
    parser.add_argument("--markdown", metavar="FILE", help="where to write the table")


def run(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains what is missing, and returns a row for each task and policy."""
    experiments = {name: sized(EXPERIMENTS[name], chosen.steps) for name in chosen.tasks}
    wanted = [
        (task, policy)
        for task, policy in itertools.product(experiments, chosen.policies)
        if applies(policy, experiments[task])
    ]
    done = load(chosen.results, experiments)
    if not chosen.only_show:
        missing = [
            (task, policy, seed)
            for (task, policy), seed in itertools.product(wanted, range(chosen.seeds))
            if (task, policy, seed) not in done
        ]
        for record in train(experiments, missing):
            append(chosen.results, record)
            done[record["task"], record["policy"], record["seed"]] = record
    seeds = range(chosen.seeds)
    runs = {pair: {s: done[*pair, s] for s in seeds if (*pair, s) in done} for pair in wanted}
    return [summary(*pair, runs, experiments[pair[0]]) for pair in wanted if runs[pair]]


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Writes the table and draws the picture if asked to."""
    if chosen.markdown:
        pathlib.Path(chosen.markdown).write_text(accuracy_table.markdown(rows))
    if chosen.plot:
        accuracy_table.draw(rows, pathlib.Path(chosen.plot))


def sized(experiment: Experiment, steps: int | None) -> Experiment:
    """The experiment with another number of steps, if one is given."""
    return dataclasses.replace(experiment, steps=steps) if steps else experiment


def applies(policy: str, experiment: Experiment) -> bool:
    """Whether a policy says anything else of a model than one that is there anyway."""
    if policy in jact.presets.MIXED:
        return experiment.images
    return experiment.sequences or policy not in ("pool2-tokens", "adaptive3-derivatives")


def train(
    experiments: Mapping[str, Experiment], missing: Sequence[tuple[str, str, int]]
) -> Iterator[dict[str, Any]]:
    """Yields a record for each training, with a bar for the whole and one for the present one.

    Raises:
        SystemExit: the data of a task are missing; the message says how to get them.
    """
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
    ) as bars:
        whole = bars.add_task("trainings", total=len(missing))
        for (task, policy), group in itertools.groupby(missing, key=lambda run: run[:2]):
            experiment = experiments[task]
            trainer = Trainer(experiment, POLICIES[policy])
            for _, _, seed in group:
                bar = bars.add_task(f"{task}, {policy}, seed {seed}", total=experiment.steps)
                try:
                    result = trainer.run(seed, lambda bar=bar: bars.advance(bar))
                except MissingDataError as error:
                    raise SystemExit(str(error)) from error
                bars.remove_task(bar)
                bars.advance(whole)
                bars.console.print(f"{task}, {policy}, seed {seed}: {result['accuracy']:.2f} %")
                yield {
                    "task": task,
                    "policy": policy,
                    "seed": seed,
                    **result,
                    "settings": experiment.identity(),
                    "jact": jact.__version__,
                    "jax": jax.__version__,
                }


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Adds a line to the file of results, which is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def load(
    path: pathlib.Path, experiments: Mapping[str, Experiment]
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Reads the results of these experiments; what ran with other settings is left out."""
    if not path.exists():
        return {}
    records = map(json.loads, path.read_text().splitlines())
    return {
        (r["task"], r["policy"], r["seed"]): r
        for r in records
        if r["task"] in experiments and r["settings"] == experiments[r["task"]].identity()
    }


def summary(
    task: str,
    policy: str,
    runs: Mapping[tuple[str, str], Mapping[int, dict[str, Any]]],
    experiment: Experiment,
) -> dict[str, Any]:
    """Mean and standard error over the seeds, and of the difference to plain, seed by seed."""
    own, plain = runs[task, policy], runs.get((task, "off"), {})
    values = [own[seed]["accuracy"] for seed in own]
    differences = [own[s]["accuracy"] - plain[s]["accuracy"] for s in own if s in plain]
    return {
        "label": task,
        "task": task,
        "policy": policy,
        "description": experiment.description,
        "seeds": len(values),
        "mean": statistics.fmean(values),
        "error": standard_error(values),
        "difference": statistics.fmean(differences) if differences else None,
        "difference_error": standard_error(differences),
        "seconds": statistics.fmean(own[seed]["seconds"] for seed in own),
    }


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None of fewer than two values."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
