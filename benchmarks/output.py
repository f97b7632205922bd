"""Tables for people, JSON for programs."""

import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
import rich.table

type Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]

MIB = 2**20


def announce(text: str) -> None:
    """Tells on stderr what is going on, so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def mib(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a column that shows the bytes of `row[key]` in MiB."""
    return lambda row: f"{row[key] / MIB:,.1f}"


def mib_or_dash(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a column that shows the bytes of `row[key]` in MiB, or a dash."""
    return lambda row: "-" if row[key] is None else f"{row[key] / MIB:,.1f}"


def number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a column that shows `row[key]`, or a dash where there is none."""
    return lambda row: "-" if row[key] is None else format(row[key], form)


def label(row: Mapping[str, Any]) -> str:
    """Returns what stands before the lines of one model."""
    if "label" in row:
        return str(row["label"])
    sizes = f"{row['dtype']}, batch {row['batch']}, {row['layers']} layers, {row['target']}"
    return f"{row['model']}\n[dim]{sizes}[/dim]"


def write(
    title: str,
    rows: Sequence[dict[str, Any]],
    columns: Columns,
    path: str | None,
    *,
    heading: Callable[[Mapping[str, Any]], str] = label,
    line: str = "policy",
) -> None:
    """Shows the rows as a table, and writes them as JSON if asked to.

    Args:
        title: The table's title.
        rows: The results.
        columns: Headings, each with the function that shows a row in that column.
        path: The JSON file; "-" is stdout, where nothing else is printed then; None is no JSON.
        heading: What rows that belong together have in common; it stands before them.
        line: The key of what tells them apart.
    """
    if path == "-":
        print(json.dumps(rows, indent=2))
    elif path is not None:
        pathlib.Path(path).write_text(json.dumps(rows, indent=2) + "\n")
    console = rich.console.Console(stderr=path == "-")
    if not console.is_terminal:
        # A file has no width to keep to.
        console.width = 200
    console.print(_table(title, rows, columns, heading, line))


def _table(
    title: str,
    rows: Sequence[dict[str, Any]],
    columns: Columns,
    heading: Callable[[Mapping[str, Any]], str],
    line: str,
) -> rich.table.Table:
    table = rich.table.Table(title=title)
    table.add_column("")
    # In a narrow terminal the first column wraps, so that figures are never cut off.
    table.add_column(line, no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    # One table row per model, one line in it per policy.
    for name, group in itertools.groupby(rows, key=heading):
        lines = list(group)
        cells = [[row[line] for row in lines]]
        cells += [[show(row) for row in lines] for show in columns.values()]
        table.add_row(name, *("\n".join(cell) for cell in cells), end_section=True)
    return table
