"""Peak memory, time and gradient error of rematerialisation and jact together, as a picture.

Each gradient is compiled once for its peak and run for its error and its time. Times are CPU
seconds, which other programs on the machine hardly change, as ratios to plain JAX. A policy is on
the frontier if no other is at least as good in all three and better in one.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jact.memory
import jact.presets
from benchmarks import fidelity, options, output
from benchmarks.frontier import efficient, place_labels
from benchmarks.options import REMAT, Case, positive
from benchmarks.time import interleave

COLUMNS: output.Columns = {
    "peak MiB": output.mib("peak_bytes"),
    "/ off": output.number("peak_ratio", ".3f"),
    "time / off": output.number("time_ratio", ".2f"),
    "relative error": output.number("relative_error", ".1e"),
    "on the frontier": lambda row: "yes" if row["efficient"] else "no",
}
# Two exact gradients differ by rounding, in another order of sums.
EXACT = 1e-5
_KEYS = ("peak_bytes", "time_ratio", "error_beyond_rounding")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--rounds", type=positive, default=7, help="how often each policy runs")
    parser.add_argument("--draws", type=positive, default=1, help="draws for the error")
    parser.add_argument("--picture", metavar="FILE", help="where to draw it; the ending says how")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case; "off" is added if it is missing."""
    draws = [fidelity.arguments(case, seed, images="natural") for seed in range(chosen.draws)]
    # A policy for images comes to another one where there are none.
    skipped = () if "images" in draws[0][2] else jact.presets.MIXED
    policies = tuple(p for p in dict.fromkeys(("off", *case.policies)) if p not in skipped)
    analyses = {}
    for policy in policies:
        output.announce(f"compiling {case.model} with {policy}")
        analyses[policy] = jact.memory.analyze(jax.jit(case.gradient(policy)), *draws[0])
    compiled = {policy: analysis.compiled for policy, analysis in analyses.items()}
    exact = [fidelity.flat_gradient(compiled["off"], draw) for draw in draws]
    seconds = interleave(compiled, draws[0], chosen.rounds, time.process_time)
    rows = []
    for policy in policies:
        errors = [
            fidelity.relative_error(fidelity.flat_gradient(compiled[policy], draw), gradient)
            for draw, gradient in zip(draws, exact, strict=True)
        ]
        ratios = [a / b for a, b in zip(seconds[policy], seconds["off"], strict=True)]
        error = float(np.mean(errors))
        figures = {
            "peak_bytes": analyses[policy].temp_bytes,
            "peak_ratio": analyses[policy].temp_bytes / analyses["off"].temp_bytes,
            "time_ratio": statistics.median(ratios),
            "relative_error": error,
            "error_beyond_rounding": error if error > EXACT else 0.0,
        }
        rows.append(case.row(policy, jax.default_backend(), **figures))
    yield from efficient(rows, _KEYS)


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Draws the picture if one is asked for."""
    if chosen.picture:
        draw(rows, pathlib.Path(chosen.picture))


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws a column per model: peak against error above, peak against time below.

    Squares are exact gradients, circles jact's; what is on the frontier is filled.

    Args:
        rows: what `measure` yielded.
        path: the file to write.
    """
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        2,
        len(models),
        figsize=(5 * len(models), 8),
        layout="constrained",
        squeeze=False,
        sharex="col",
    )
    for (above, below), model in zip(panels.T, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        above.set_title(f"{model}, {own[0]['dtype']}")
        above.set_yscale("log")
        above.set_ylabel("relative error of the gradient")
        below.set_ylabel("CPU seconds, relative to plain JAX")
        below.set_xlabel("peak memory, relative to plain JAX")
        for panel, key in ((above, "relative_error"), (below, "time_ratio")):
            points = []
            for row in own:
                point = (row["peak_ratio"], max(row[key], EXACT if panel is above else 0))
                points.append(point)
                plain = row["policy"] == "off" or row["policy"] in REMAT
                panel.plot(
                    *point,
                    marker="s" if plain else "o",
                    markersize=6,
                    color="#a63d57" if plain else "#1f4e79",
                    fillstyle="full" if row["efficient"] else "none",
                    linestyle="none",
                )
            panel.margins(x=0.2, y=0.14)
            panel.grid(True, which="major", alpha=0.3)
            labels = [options.SHORT_LABELS.get(row["policy"], row["policy"]) for row in own]
            place_labels(panel, labels, points)
        above.axhline(EXACT, color="0.6", linewidth=0.8, linestyle=":")
    figure.savefig(path, dpi=130)
    plt.close(figure)
