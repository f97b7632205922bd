"""How a table of sensitivities looks: as text and as a picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jact.memory.report_render import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jact.adapt.table import Sensitivities


def table(sensitivities: Sensitivities) -> Table:
    """A table for rich to print: a row for each residual, a column for each codec.

    Each entry is the error relative to the gradient (the root of the ratio of squared norms), and
    what is saved.
    """
    result = Table(
        title="Relative error of the gradient, and bytes",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    result.add_column("residual", no_wrap=True)
    result.add_column("bytes", justify="right", no_wrap=True)
    chosen = [j for j, codec in enumerate(sensitivities.codecs) if codec.name != "keep"]
    for j in chosen:
        result.add_column(sensitivities.codecs[j].name, justify="right", no_wrap=True)
    relative = _relative(sensitivities)
    for i, name in enumerate(sensitivities.names):
        cells = [
            f"{relative[i, j]:.1e} {format_bytes(int(sensitivities.nbytes[i, j]))}"
            if np.isfinite(sensitivities.error[i, j])
            else "-"
            for j in chosen
        ]
        size = format_bytes(int(sensitivities.raw_bytes[i]))
        result.add_row(*(Text(cell) for cell in (name, size, *cells)))
    return result


def text(sensitivities: Sensitivities) -> str:
    """The table as plain text, as wide as it needs to be."""
    file = io.StringIO()
    console = Console(
        file=file, color_system=None, force_jupyter=False, force_terminal=False, width=10**4
    )
    console.print(table(sensitivities))
    return "\n".join(line.strip("\n").rstrip() for line in file.getvalue().splitlines())


def plot(sensitivities: Sensitivities) -> Figure:
    """The errors by residual, a line for each codec; and what each saves, as bars."""
    from matplotlib.figure import Figure

    names = sensitivities.names
    figure = Figure(figsize=(9, max(2.5, 0.28 * len(names) + 1.5)), layout="constrained")
    errors, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    places = np.arange(len(names))
    relative = _relative(sensitivities)
    for j, codec in enumerate(sensitivities.codecs):
        if codec.name == "keep":
            continue
        known = np.isfinite(relative[:, j]) & (relative[:, j] > 0)
        colour = f"C{j}"
        errors.plot(relative[known, j], places[known], "o-", color=colour, label=codec.name)
        sizes.plot(sensitivities.nbytes[known, j] / 2**20, places[known], "|", color=colour, ms=9)
    sizes.barh(places, sensitivities.raw_bytes / 2**20, color="0.85", zorder=0)
    errors.set_yticks(places, names, fontsize=7)
    errors.invert_yaxis()
    if errors.lines:
        errors.set_xscale("log")
        errors.legend(fontsize=8)
    errors.set_xlabel("relative error of the gradient")
    errors.grid(True, axis="x", alpha=0.3)
    sizes.set_xlabel("MiB")
    return figure


def _relative(sensitivities: Sensitivities) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(sensitivities.error / sensitivities.gradient)
