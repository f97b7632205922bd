"""The results of `python -m benchmarks accuracy` as a Markdown table and as a picture."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

type Row = Mapping[str, Any]


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line for each policy and a column for each task.

    Plain JAX's line gives accuracies in percent, the others differences to it in points.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    found = {(row["task"], row["policy"]): row for row in rows}
    lines = ["| | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for policy in policies:
        cells = [_cell(found.get((task, policy)), policy == "off") for task in tasks]
        name = "plain JAX, %" if policy == "off" else f"`{policy}`"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None, plain: bool) -> str:
    if row is None:
        return ""
    value, error = ("mean", "error") if plain else ("difference", "difference_error")
    if row[value] is None:
        return ""
    text = f"{row[value]:.2f}" if plain else f"{row[value]:+.2f}"
    return text if row[error] is None else f"{text} ± {row[error]:.2f}"


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws a panel per task: each policy's difference to plain JAX, and plain JAX's own spread.

    Args:
        rows: what `accuracy.run` returned.
        path: the file to write; the ending says how.
    """
    import matplotlib.pyplot as plt

    # Beyond this, an arrow and a number stand for the point, so that the others can be told apart.
    edge = -5.0
    groups = [
        (task, list(own)) for task, own in itertools.groupby(rows, key=lambda row: row["task"])
    ]
    policies = list(dict.fromkeys(r["policy"] for r in rows if r["policy"] != "off"))
    figure, panels = plt.subplots(
        1,
        len(groups),
        figsize=(1.6 + 2.4 * len(groups), 1 + 0.32 * len(policies)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    places = {policy: len(policies) - i for i, policy in enumerate(policies)}
    for panel, (task, own) in zip(panels[0], groups, strict=True):
        plain = next((row for row in own if row["policy"] == "off"), None)
        if plain is not None and plain["error"] is not None:
            panel.axvspan(-plain["error"], plain["error"], color="0.88", zorder=0)
        panel.axvline(0, color="0.4", linewidth=0.8, zorder=1)
        for row in own:
            if row["policy"] == "off" or row["difference"] is None:
                continue
            if row["difference"] < edge:
                text = f"◀ {row['difference']:.0f} ± {row['difference_error'] or 0:.0f}"
                place = (0.02, places[row["policy"]])
                panel.annotate(
                    text, place, xycoords=("axes fraction", "data"), va="center", fontsize=8
                )
            else:
                panel.errorbar(
                    row["difference"],
                    places[row["policy"]],
                    xerr=row["difference_error"] or 0,
                    color="#1f4e79",
                    marker="o",
                    markersize=5,
                    capsize=2,
                    linewidth=1.2,
                )
        mean = "" if plain is None else f"\nplain {plain['mean']:.1f} %"
        panel.set_title(f"{task}{mean}", fontsize=10)
        panel.set_xlabel("points to plain JAX")
        panel.set_yticks(list(places.values()), list(places))
        panel.set_ylim(0.4, len(policies) + 0.6)
        panel.margins(x=0.15)
        panel.grid(True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
