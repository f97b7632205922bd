"""Each policy's peak memory against its gradient's error, as a table and as a picture.

The gradient is compiled once for its peak and run for its error. Images are random with the
spectrum of natural ones, as codecs that average over neighbours have nothing to hold on to in white
noise. A policy is on the frontier if no other has as low a peak with a smaller error.
"""

import argparse
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jact.memory
import jact.presets
from benchmarks import fidelity, output
from benchmarks.options import REMAT, Case, positive

COLUMNS: output.Columns = {
    "peak MiB": output.mib("peak_bytes"),
    "/ off": output.number("peak_ratio", ".3f"),
    "saved MiB": output.mib("saved_bytes"),
    "relative error": output.number("relative_error", ".2e"),
    "on the frontier": lambda row: "yes" if row["efficient"] else "no",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--draws", type=positive, default=1, help="draws of parameters and batch")
    parser.add_argument("--picture", metavar="FILE", help="where to draw it; the ending says how")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case but "off" and those in `REMAT`.

    A policy for images is left out where there are none, as it comes to another one there.
    """
    draws = [fidelity.arguments(case, seed, images="natural") for seed in range(chosen.draws)]
    plain = jax.jit(case.gradient("off"))
    analysis = jact.memory.analyze(plain, *draws[0])
    exact = [fidelity.flat_gradient(analysis.compiled, draw) for draw in draws]
    rows = []
    for policy in case.policies:
        without_images = "images" not in draws[0][2]
        if policy == "off" or policy in REMAT or (without_images and policy in jact.presets.MIXED):
            continue
        output.announce(f"compiling and running {case.model} with {policy}")
        own = jact.memory.analyze(jax.jit(case.gradient(policy)), *draws[0])
        errors = [
            fidelity.relative_error(fidelity.flat_gradient(own.compiled, draw), gradient)
            for draw, gradient in zip(draws, exact, strict=True)
        ]
        loss = case.task(policy).loss
        report = jact.report(lambda *args, loss=loss: loss(*args)[0], policy)(*draws[0])
        figures = {
            "peak_bytes": own.temp_bytes,
            "peak_ratio": own.temp_bytes / analysis.temp_bytes,
            "saved_bytes": report.saved_bytes,
            "relative_error": float(np.mean(errors)),
        }
        rows.append(case.row(policy, jax.default_backend(), **figures))
    yield from efficient(rows, ("peak_bytes", "relative_error"))


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Draws the picture if one is asked for."""
    if chosen.picture:
        draw(rows, pathlib.Path(chosen.picture))


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws one panel per model: the peak on one axis, error on the other, a line of the best.

    Args:
        rows: what `measure` yielded.
        path: the file to write.
    """
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        1, len(models), figsize=(6 * len(models), 4.6), layout="constrained", squeeze=False
    )
    for panel, model in zip(panels[0], models, strict=True):
        own = sorted((r for r in rows if r["model"] == model), key=lambda r: r["peak_ratio"])
        best = [row for row in own if row["efficient"]]
        panel.plot(
            *([row[key] for row in best] for key in ("peak_ratio", "relative_error")),
            color="C0",
            linewidth=1,
            zorder=1,
        )
        for row in own:
            colour = "C0" if row["efficient"] else "0.55"
            panel.scatter(row["peak_ratio"], row["relative_error"], color=colour, s=28, zorder=2)
        panel.set_yscale("log")
        panel.margins(x=0.16, y=0.12)
        panel.set_xlabel("peak memory, relative to plain JAX")
        panel.set_ylabel("relative error of the gradient")
        panel.set_title(f"{model}, {own[0]['dtype']}")
        panel.grid(True, which="major", alpha=0.3)
        points = [(row["peak_ratio"], row["relative_error"]) for row in own]
        place_labels(panel, [row["policy"] for row in own], points)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def place_labels(panel: Any, labels: Sequence[str], points: Sequence[tuple[float, float]]) -> None:
    """Writes a label beside each point, on the side where there is room.

    Args:
        panel: the matplotlib axes.
        labels: the labels.
        points: where they belong.

    Raises:
        ValueError: there is no room for one of them.
    """
    panel.figure.canvas.draw()
    renderer = panel.figure.canvas.get_renderer()
    taken = [panel.transData.transform(point) for point in points]
    boxes: list[Any] = []
    places = [(dx, dy) for dy in (0, 9, -9, 18, -18, 27, -27) for dx in (6, -6, 0) if dx or dy]
    for label, point in zip(labels, points, strict=True):
        for dx, dy in places:
            side = {6: "left", -6: "right", 0: "center"}[dx]
            text = panel.annotate(
                label,
                point,
                xytext=(dx, dy),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=8,
            )
            box = text.get_window_extent(renderer).padded(1)
            free = not any(box.overlaps(other) for other in boxes)
            if free and not any(box.padded(4).contains(*spot) for spot in taken):
                boxes.append(box)
                break
            text.remove()
        else:
            raise ValueError(f"no room for the label {label}")


def efficient(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The rows, each with whether no other is as good in all figures, and better in one."""

    def dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all(a[k] <= b[k] for k in keys) and any(a[k] < b[k] for k in keys)

    return [row | {"efficient": not any(dominates(other, row) for other in rows)} for row in rows]
