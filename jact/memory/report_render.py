"""How a report looks: as text of any width, in colour in a terminal, and as HTML in a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from jact.memory import advice
from jact.memory.report_groups import by_layer, grouped, largest_first
from jact.memory.sizes import format_bytes
from jact.memory.tables import Cells, html_table, plain_text, rich_table
from jact.memory.tables import escape as _escape

if TYPE_CHECKING:
    from jact.memory.report import Report, Row

_COLUMNS = ("residual", "line", "type", "bytes", "codec", "saved", "why")
_GROUP_COLUMNS = ("codec", "why", "values", "bytes", "saved")
_TOTAL_COLUMNS = ("values", "bytes", "saved")
_NUMBERS = frozenset(_TOTAL_COLUMNS)
# How many modules the table of totals tells apart.
_MODULES = 12


class Renderable:
    """A report for rich to print, which looks different where there is less room."""

    def __init__(self, report: Report):
        self._report = report

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        report = self._report
        yield Text(_title(report), style="bold")
        if report.rows:
            yield Text()
            table = rich_table(_COLUMNS, _shown(report), _NUMBERS, "keep")
            room = options.update(width=10**6)
            if console.measure(table, options=room).maximum <= options.max_width:
                yield table
            else:
                yield from _stacked(_shown(report))
            for columns, rows in _totals(report):
                yield Text()
                yield rich_table(columns, rows, _NUMBERS, "keep")
            yield Text()
        for sentence in sentences(report):
            yield Text(sentence)


def text(report: Report) -> str:
    """A report as plain text, as wide as the terminal."""
    return plain_text(Renderable(report))


def html(report: Report) -> str:
    """A report as HTML."""
    parts = [f"<p><b>{_escape(_title(report))}</b></p>"]
    if report.rows:
        parts.append(html_table(_COLUMNS, _shown(report, with_functions=True), _NUMBERS))
        parts += [html_table(columns, rows, _NUMBERS) for columns, rows in _totals(report)]
    parts.append(f"<p>{'<br>'.join(map(_escape, sentences(report)))}</p>")
    return f"<div>{''.join(parts)}</div>"


def sentences(report: Report) -> Iterator[str]:
    """What the figures of a report come to."""
    yield _gain(report)
    exact = [row for row in report.rows if row.exact]
    if exact and report.policy != "off":
        size = format_bytes(sum(row.saved_bytes for row in exact))
        values = _count(len(report.rows), "value")
        yield f"Exact: {len(exact)} of {values}, {size} of what is saved."
    if report.offloaded_bytes:
        yield _offloaded(report)
    if report.reference_arrays:
        arguments = _count(report.reference_arrays, "argument")
        size = format_bytes(report.reference_bytes)
        yield f"The backward pass also reads {arguments} ({size}), kept by reference at no cost."
    if report.peak is not None:
        yield _peak(report)
    yield from advice.sentences(report)


def _gain(report: Report) -> str:
    plain, saved = format_bytes(report.plain_bytes), format_bytes(report.saved_bytes)
    if not report.rows and not report.plain_bytes:
        return "Nothing is gained: the backward pass reads nothing but arguments."
    if report.policy == "off":
        return f"JAX saves {saved}."
    if report.saved_bytes < report.plain_bytes:
        less = _times_less(report.plain_bytes, report.saved_bytes)
        return f"jact saves {saved}, JAX {plain}{less}."
    words = f"Nothing is gained: jact saves {saved}, JAX {plain}."
    if all(row.exact for row in report.rows):
        words += " No value is worth encoding, so the gradient is the plain one."
    return words


def _peak(report: Report) -> str:
    assert report.peak is not None
    plain, ours = format_bytes(report.peak.plain_bytes), format_bytes(report.peak.bytes)
    if report.policy == "off":
        return f"Compiled peak of the gradient: {plain}."
    if report.peak.bytes < report.peak.plain_bytes:
        less = _times_less(report.peak.plain_bytes, report.peak.bytes)
        return f"Compiled peak of the gradient: {ours} with jact, {plain} without{less}."
    return f"The compiled peak of the gradient is not lower: {ours} with jact, {plain} without."


def _offloaded(report: Report) -> str:
    words = f"Of that, {format_bytes(report.offloaded_bytes)} is sent to host memory."
    if report.peak is None:
        return words
    if report.peak.host_bytes is None:
        return f"{words} A CPU has no other, so it stays where it is."
    if report.peak.host_bytes == 0:
        return (
            f"{words} But the compiler dropped the transfers, and it stays on the device: XLA for "
            "GPUs does so outside of loops. Put the layers into a lax.scan."
        )
    return f"{words} The compiled program keeps {format_bytes(report.peak.host_bytes)} there."


def _times_less(before: int, after: int) -> str:
    return f": {before / after:.1f} times less" if after else ""


def _title(report: Report) -> str:
    return f"What {report.function} saves for its backward pass, policy {report.policy}"


def _shown(report: Report, with_functions: bool = False) -> list[Cells]:
    """The cells of the rows to print; a string stands for the rows left out in the middle."""
    rows = report.rows
    lines = [_cells(row, with_functions) for row in rows]
    if report.max_rows is None or len(rows) <= report.max_rows:
        return list(lines)
    last = report.max_rows // 2
    first = report.max_rows - last
    hidden = len(rows) - report.max_rows
    words = f"... {hidden} more rows" if hidden > 1 else "... 1 more row"
    return [*lines[:first], words, *lines[len(rows) - last :]]


def _cells(row: Row, with_function: bool) -> tuple[str, ...]:
    return (
        row.name,
        row.line if with_function else row.line.partition(" ")[0],
        _type(row),
        format_bytes(row.bytes),
        row.codec,
        format_bytes(row.saved_bytes),
        row.why,
    )


def _totals(report: Report) -> Iterator[tuple[tuple[str, ...], list[Cells]]]:
    """Columns and rows of the tables of totals: by kind, by module, by codec and reason."""
    for by, groups in (
        ("kind", largest_first(grouped(report.rows, "kind"))),
        ("module", by_layer(report.rows, _MODULES)),
    ):
        if len(groups) > 1:
            rows: list[Cells] = [
                (g.name or "-", str(g.values), format_bytes(g.bytes), format_bytes(g.saved_bytes))
                for g in groups[:_MODULES]
            ]
            if rest := len(groups) - len(rows):
                rows.append(f"... {rest} more")
            yield (by, *_TOTAL_COLUMNS), rows
    yield _GROUP_COLUMNS, _groups(report.rows)


def _groups(rows: Iterable[Row]) -> list[Cells]:
    """Totals of the rows that share a codec and a reason, the largest first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.codec, row.why), []).append(row)
    totals = [
        (codec, why, len(group), sum(r.bytes for r in group), sum(r.saved_bytes for r in group))
        for (codec, why), group in groups.items()
    ]
    totals.sort(key=lambda total: -total[-1])
    return [(*t[:2], str(t[2]), format_bytes(t[3]), format_bytes(t[4])) for t in totals]


def _stacked(rows: Sequence[Cells]) -> Iterator[Text]:
    """Rows of two lines, for where a name and its figures do not fit next to each other."""
    lines = [_COLUMNS, *(row for row in rows if not isinstance(row, str))]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]

    def two_lines(cells: Sequence[str], name_style: str, style: str) -> Text:
        padded = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, cell, width in zip(_COLUMNS, cells, widths, strict=True)
        ]
        first = Text(cells[0], style=name_style).append(f"  {cells[-1]}", style=style)
        return first.append("\n  " + "  ".join(padded[1:-1]), style=style)

    yield two_lines(_COLUMNS, "bold", "bold")
    for row in rows:
        yield Text(row) if isinstance(row, str) else two_lines(row, "", "dim")


def _type(row: Row) -> str:
    """A type as JAX prints it: `f32[8,128]`."""
    dtype = re.sub(r"^(float|uint|int|complex)(?=\d)", lambda m: m[0][0], row.dtype)
    dtype = dtype.replace("bfloat16", "bf16")
    return f"{dtype}[{','.join(map(str, row.shape))}]"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
