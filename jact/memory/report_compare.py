"""Reports side by side, and the difference between two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from jact.memory import tables
from jact.memory.sizes import format_bytes

if TYPE_CHECKING:
    from jact.memory.report import Report

_LENGTH = 60


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Reports of one function under several policies, residual by residual.

    `Report.compare` and the difference of two reports make it. It prints as a table, in terminals
    and in notebooks.

    Attributes:
        reports: the reports; the first is what the others are compared with.
        changes: whether what is stored alike in all of them is left out.

    Raises:
        ValueError: fewer than two reports.
    """

    reports: tuple[Report, ...]
    changes: bool = False

    def __post_init__(self) -> None:
        if len(self.reports) < 2:
            raise ValueError("there must be another report to compare with")

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells the reports apart: their policies, and their functions where these differ."""
        policies = [report.policy for report in self.reports]
        if len(set(policies)) == len(policies):
            return tuple(policies)
        names = [f"{report.function}, {report.policy}" for report in self.reports]
        if len(set(names)) == len(names):
            return tuple(names)
        return tuple(f"{name} ({i})" for i, name in enumerate(names, 1))

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per residual, as `pandas.DataFrame` takes them, the most changed first.

        The entries `codec (label)` and `saved_bytes (label)` are those of each report: None and 0
        where the residual is not saved. `change` is the last report's bytes less the first one's.
        """
        rows = [{row.name: row for row in report.rows} for report in self.reports]
        names = dict.fromkeys(name for own in rows for name in own)
        records = []
        for name in names:
            found = [own.get(name) for own in rows]
            codecs = [row.codec if row is not None else None for row in found]
            saved = [row.saved_bytes if row is not None else 0 for row in found]
            if self.changes and len(set(zip(codecs, saved, strict=True))) == 1:
                continue
            record: dict[str, Any] = {"name": name}
            for label, codec, size in zip(self.labels, codecs, saved, strict=True):
                record |= {f"codec ({label})": codec, f"saved_bytes ({label})": size}
            records.append(record | {"change": saved[-1] - saved[0]})
        return sorted(records, key=lambda record: -abs(record["change"]))

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON objects."""
        totals = {
            label: report.saved_bytes
            for label, report in zip(self.labels, self.reports, strict=True)
        }
        peaks = {
            label: report.peak.bytes
            for label, report in zip(self.labels, self.reports, strict=True)
            if report.peak is not None
        }
        measured = {"peak_bytes": peaks} if peaks else {}
        return {"saved_bytes": totals, **measured, "residuals": self.records()}

    def sentences(self) -> Iterator[str]:
        """What the comparison comes to."""
        first = self.reports[0]
        for label, report in zip(self.labels[1:], self.reports[1:], strict=True):
            change = report.saved_bytes - first.saved_bytes
            words = f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'}"
            yield (
                f"{label} takes {words if change else 'as much'} "
                f"{'than' if change else 'as'} {self.labels[0]}."
            )
        for label, report in zip(self.labels, self.reports, strict=True):
            if (peak := report.peak) is not None:
                sizes = (format_bytes(size) for size in (peak.bytes, peak.plain_bytes))
                yield "Peak of the gradient under {}: {}, under plain JAX {}.".format(label, *sizes)

    def __rich__(self) -> RenderableType:
        columns, rows = self._cells()
        numbers = frozenset(columns[1:])
        parts: list[RenderableType] = [tables.rich_table(columns, rows, numbers, fold=True), Text()]
        return Group(*parts, *map(Text, self.sentences()))

    def __str__(self) -> str:
        return tables.plain_text(self.__rich__())

    def _repr_html_(self) -> str:
        columns, rows = self._cells()
        words = "<br>".join(map(tables.escape, self.sentences()))
        table = tables.html_table(columns, rows, frozenset(columns[1:]))
        return f"<div>{table}<p>{words}</p></div>"

    def _cells(self) -> tuple[list[str], list[tables.Cells]]:
        records = self.records()
        rows: list[tables.Cells] = [self._row(record) for record in records[:_LENGTH]]
        if rest := len(records) - len(rows):
            rows.append(f"... {rest} more row{'s' * (rest > 1)}")
        totals = [format_bytes(report.saved_bytes) for report in self.reports]
        change = self.reports[-1].saved_bytes - self.reports[0].saved_bytes
        rows.append(("in all", *totals, format_bytes(change)))
        return ["residual", *self.labels, "change"], rows

    def _row(self, record: dict[str, Any]) -> tuple[str, ...]:
        cells = []
        for label in self.labels:
            codec = record[f"codec ({label})"]
            size = format_bytes(record[f"saved_bytes ({label})"])
            cells.append("-" if codec is None else f"{codec} {size}")
        return (record["name"], *cells, format_bytes(record["change"]))
