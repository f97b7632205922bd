"""Pictures of reports and timelines, for which matplotlib is imported when they are drawn.

Colours differ in lightness, so that pictures can be read in grey; lines differ in dashes, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jact.memory.report_groups import by_layer, grouped, largest_first
from jact.memory.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jact.memory.report import Report
    from jact.memory.timeline import Timeline

# From dark to light: told apart without their hues as well.
_COLOURS = ("#1b1b3a", "#a63d57", "#3d8bb8", "#e09f3e", "#9bc995")
_DASHES = ("-", "--", "-", ":", "-.")
_KINDS = {
    "code": "#1f4e79",
    "activation": "#c8553d",
    "mask": "#7fa8d1",
    "parameter": "#e9c46a",
    "small": "#f0f0f0",
}
_MIB = 2**20
# How many rectangles and bars can be told apart.
_MOST = 24


def timelines(lines: Sequence[Timeline], axes: Axes | None = None) -> Axes:
    """Draws timelines over each other, each stretched to the same forward and backward pass.

    Args:
        lines: the timelines, the one that matters most last.
        axes: where to draw; a new figure when None.

    Returns:
        The matplotlib axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = _pyplot()
    panel: Any = axes
    if axes is None:
        _, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
    split = all(line.backward is not None for line in lines)
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        x = [_stretched(line, position, split) for position in (*line.positions, line.length)]
        y = [size / _MIB for size in (*line.live_bytes, line.live_bytes[-1])]
        label = f"{line.label}: {format_bytes(line.peak_bytes)}"
        dashes = _DASHES[i % len(_DASHES)]
        panel.step(x, y, where="post", color=colour, linestyle=dashes, linewidth=1.6, label=label)
        panel.fill_between(x, y, step="post", color=colour, alpha=0.12, linewidth=0)
        at = _stretched(line, line.peak_position, split)
        panel.plot([at], [line.peak_bytes / _MIB], "o", color=colour, markersize=5)
    if split:
        panel.axvline(1, ymax=0.88, color="0.4", linewidth=0.8)
        panel.set_xticks([0.5, 1.5], ["forward", "backward"])
        panel.tick_params(axis="x", length=0)
        panel.set_xlim(0, 2)
    else:
        panel.set_xlabel("share of the schedule")
        panel.set_xlim(0, 1)
    panel.set_ylabel("live temporary memory, MiB")
    panel.set_ylim(0, 1.25 * max(max(line.peak_bytes, 1) for line in lines) / _MIB)
    panel.legend(loc="upper left", ncols=min(len(lines), 3), frameon=False, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    return panel


def _stretched(line: Timeline, position: int, split: bool) -> float:
    """Where a position is, if the forward pass goes from 0 to 1 and the rest from 1 to 2."""
    length = max(line.length, 1)
    if not split or not line.backward:
        return position / length
    if position <= line.backward:
        return position / line.backward
    return 1 + (position - line.backward) / max(length - line.backward, 1)


def report(found: Report, kind: str = "both") -> Figure:
    """Draws what a report says is saved.

    Args:
        found: the report.
        kind: "treemap", "bars" or "both".

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `kind` is none of these.
    """
    if kind not in ("treemap", "bars", "both"):
        raise ValueError(f'kind must be "treemap", "bars" or "both"; got {kind!r}')
    plt = _pyplot()
    kinds = ("treemap", "bars") if kind == "both" else (kind,)
    height = max(4.2, 0.24 * len(by_layer(found.rows, _MOST)) + 1.2)
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(7.2 * len(kinds), height), layout="constrained", squeeze=False
    )
    figure.suptitle(f"What {found.function} saves, policy {found.policy}", fontsize=11)
    labels: list[_Label] = []
    for panel, one in zip(panels[0], kinds, strict=True):
        if one == "treemap":
            labels = _treemap(panel, found)
        else:
            _bars(panel, found)
    # How large a rectangle is, and so its label, is known when everything else has its place.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for label in labels:
        _fit(panels[0][0], label)
    return figure


@dataclasses.dataclass(frozen=True)
class _Label:
    """What to write into a rectangle, given by its left, lower edge, width and height."""

    text: str
    box: tuple[float, float, float, float]
    colour: str


def _treemap(axes: Axes, found: Report) -> list[_Label]:
    """Modules as rectangles as large as what they save, coloured by what most of that is.

    Returns:
        The labels, which are still to be written.
    """
    groups = [g for g in largest_first(by_layer(found.rows, _MOST)) if g.saved_bytes]
    shown, rest = groups[: _MOST - 1], groups[_MOST - 1 :]
    sizes = [g.saved_bytes for g in shown] + [sum(g.saved_bytes for g in rest)] * bool(rest)
    names = [g.name or "(no module)" for g in shown] + [f"{len(rest)} more"] * bool(rest)
    kinds = [largest_first(grouped(g.rows, "kind"))[0].name for g in shown] + ["small"] * bool(rest)
    axes.set_axis_off()
    axes.set_title(f"saved: {format_bytes(found.saved_bytes)}, by module", fontsize=10)
    axes.set_xlim(0, 1.6)
    axes.set_ylim(0, 1)
    from matplotlib.patches import Rectangle

    common = _common_root(names)
    labels = []
    boxes = squarify(sizes, 1.6, 1.0)
    for box, name, size, kind in zip(boxes, names, sizes, kinds, strict=True):
        x, y, width, height = box
        axes.add_patch(
            Rectangle((x, y), width, height, facecolor=_KINDS[kind], edgecolor="white", lw=1.5)
        )
        text = f"{name.removeprefix(common)}\n{format_bytes(size)}"
        labels.append(_Label(text, box, "white" if kind in _DARK else "black"))
    areas = dict.fromkeys(kinds, 0)
    for kind, size in zip(kinds, sizes, strict=True):
        areas[kind] += size
    seen = [kind for kind, area in areas.items() if area > 0.001 * sum(sizes)]
    _kind_legend(axes, seen, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return labels


_DARK = frozenset({"code", "activation"})


def _bars(axes: Axes, found: Report) -> None:
    """Each layer's bytes before and after, in the order of the model."""
    groups = by_layer(found.rows, _MOST)
    # Bars too short to be seen only take room.
    least = 0.002 * max((g.bytes for g in groups), default=0)
    groups = [g for g in groups if g.bytes > least]
    if len(groups) > _MOST:
        largest = sorted(groups, key=lambda g: -g.bytes)[:_MOST]
        groups = [g for g in groups if g in largest]
    names = [g.name or "(no module)" for g in groups]
    common = _common_root(names)
    places = range(len(groups))
    before = [g.bytes / _MIB for g in groups]
    axes.barh(places, before, height=0.78, facecolor="white", edgecolor="0.45", lw=0.8)
    left = [0.0] * len(groups)
    used = []
    for kind, colour in _KINDS.items():
        sizes = [sum(r.saved_bytes for r in g.rows if r.kind == kind) / _MIB for g in groups]
        if sum(sizes) <= 0.002 * sum(before):
            continue
        used.append(kind)
        axes.barh(places, sizes, left=left, height=0.46, color=colour, edgecolor="0.3", lw=0.3)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set_yticks(list(places), [name.removeprefix(common) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.set_title("each layer: its values (outline) and what is saved (filled)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    _kind_legend(axes, used, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _kind_legend(axes: Axes, kinds: Sequence[str], **where: Any) -> None:
    from matplotlib.patches import Patch

    used = [kind for kind in _KINDS if kind in kinds]
    handles = [Patch(facecolor=_KINDS[kind], label=kind) for kind in used]
    axes.legend(handles=handles, ncols=len(used), frameon=False, fontsize=8, **where)


def _fit(axes: Axes, label: _Label) -> None:
    """Writes a label as large as its rectangle allows; not at all where none would fit."""
    x, y, width, height = label.box
    figure: Any = axes.figure
    renderer = figure.canvas.get_renderer()
    corners = axes.transData.transform([(x, y), (x + width, y + height)])
    room = (corners[1] - corners[0]) * 0.94
    for size in (10, 9, 8, 7, 6):
        for lines in (label.text, label.text.replace("/", "/\n")):
            text = axes.text(
                x + width / 2, y + height / 2, lines, ha="center", va="center", fontsize=size
            )
            text.set_color(label.colour)
            extent = text.get_window_extent(renderer)
            if extent.width <= room[0] and extent.height <= room[1]:
                return
            text.remove()


def _common_root(names: Sequence[str]) -> str:
    """The root module's name that most names begin with, which they can do without."""
    roots = {name.partition("/")[0] for name in names if "/" in name}
    return f"{roots.pop()}/" if len(roots) == 1 else ""


def squarify(
    sizes: Sequence[float], width: float, height: float
) -> list[tuple[float, float, float, float]]:
    """Lays out rectangles of given areas, as nearly square as may be.

    Rectangles are laid in rows along the shorter side of what is free, and a row grows as long as
    that makes its worst rectangle squarer (Bruls, Huizing and van Wijk, "Squarified Treemaps",
    2000).

    Args:
        sizes: what the areas are proportional to, descending and positive.
        width: the width of the whole.
        height: the height of the whole.

    Returns:
        The left, lower edge, width and height of each rectangle.

    >>> squarify([2, 1, 1], 2.0, 2.0)
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    scale = width * height / (sum(sizes) or 1)
    areas = [size * scale for size in sizes]
    boxes: list[tuple[float, float, float, float]] = []
    x = y = 0.0
    while len(boxes) < len(areas):
        side = min(width, height)
        row = [areas[len(boxes)]]
        for area in areas[len(boxes) + 1 :]:
            if _worst([*row, area], side) > _worst(row, side):
                break
            row.append(area)
        depth = sum(row) / side
        along = 0.0
        for area in row:
            extent = area / depth
            upright = width >= height
            boxes.append(
                (x, y + along, depth, extent) if upright else (x + along, y, extent, depth)
            )
            along += extent
        if width >= height:
            x, width = x + depth, max(width - depth, 1e-12)
        else:
            y, height = y + depth, max(height - depth, 1e-12)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of the sides of a row's rectangles."""
    depth = sum(row) / side
    return max(max(depth * depth / area, area / (depth * depth)) for area in row)


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return plt
