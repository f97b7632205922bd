"""Live memory over a gradient's schedule under each policy, and what is live at the peak.

Nothing is run and nothing is allocated. With `--picture`, one panel per model is drawn, with the
policies over each other.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jact.memory
from benchmarks import options, output
from benchmarks.options import Case, use_cpu

COLUMNS: output.Columns = {
    "peak MiB": output.mib("peak_bytes"),
    "/ set aside": output.number("share", ".3f"),
    "pass": lambda row: row["phase"],
    "largest at the peak": lambda row: row["largest"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    options.add_target(parser)
    parser.add_argument("--picture", metavar="FILE", help="where to draw it; the ending says how")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case."""
    use_cpu()
    target = None if chosen.target == "cpu" else chosen.target
    for policy in case.policies:
        output.announce(f"compiling {case.model} with {policy} for {chosen.target}")
        course = jact.memory.timeline(
            case.gradient(policy),
            *case.task(policy).abstract(),
            target=target,
            label=options.LABELS.get(policy, f"jact {policy}"),
        )
        first = course.buffers[0]
        yield case.row(
            policy,
            chosen.target,
            peak_bytes=course.peak_bytes,
            share=course.peak_bytes / course.temp_bytes,
            phase=course.peak_phase,
            largest=f"{first.type} {first.operation}",
            timeline=course.to_json(),
        )


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Draws the picture if one is asked for."""
    if not chosen.picture:
        return
    import matplotlib.pyplot as plt

    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["model"])]
    figure, panels = plt.subplots(
        1, len(groups), figsize=(8 * len(groups), 4.2), layout="constrained", squeeze=False
    )
    for panel, group in zip(panels[0], groups, strict=True):
        first, *others = (jact.memory.Timeline.from_json(row["timeline"]) for row in group)
        first.plot(*others, axes=panel)
        panel.set_title(f"{group[0]['model']}, {group[0]['dtype']}, {chosen.target}", fontsize=10)
    figure.savefig(chosen.picture, dpi=140)
    plt.close(figure)
