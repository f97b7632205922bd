"""Tables of text: the same cells as text of any width, in a terminal, and as HTML."""

from __future__ import annotations

import html as html_lib
import io
from collections.abc import Collection, Iterable, Sequence

import rich.box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

#: A row of a table; a string alone stands for rows that are left out.
type Cells = tuple[str, ...] | str


def rich_table(
    columns: Sequence[str],
    rows: Iterable[Cells],
    numbers: Collection[str],
    dim: str = "",
    fold: bool = False,
) -> Table:
    """A table for rich.

    Args:
        columns: the headings.
        rows: the cells.
        numbers: the headings of columns that are aligned to the right.
        dim: a cell that makes its row recede.
        fold: whether the first column goes on in another line where there is no room.
    """
    rows = [(row,) if isinstance(row, str) else row for row in rows]
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        right = column in numbers
        wraps = fold and i == 0
        table.add_column(
            column,
            justify="right" if right else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
            min_width=None if wraps else max((len(r[i]) for r in rows if len(r) > i), default=0),
        )
    for cells in rows:
        # Text, as a type's brackets would be markup to rich.
        table.add_row(*(Text(cell) for cell in cells), style="dim" if dim in cells else "")
    return table


def html_table(columns: Sequence[str], rows: Iterable[Cells], numbers: Collection[str]) -> str:
    """A table as HTML; the arguments are those of `rich_table`."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align: {"right" if column in numbers else "left"}">'
            f"{escape(value)}</{tag}>"
            for column, value in zip(columns, values, strict=True)
        )

    body = [
        f'<tr><td colspan="{len(columns)}">{escape(row)}</td></tr>'
        if isinstance(row, str)
        else f"<tr>{cells('td', row)}</tr>"
        for row in rows
    ]
    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>"


def plain_text(*parts: RenderableType) -> str:
    """What rich prints, without colours, as wide as the terminal."""
    file = io.StringIO()
    console = Console(file=file, color_system=None, force_jupyter=False, force_terminal=False)
    for part in parts:
        console.print(part)
    # Tables are padded to their full width.
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def escape(value: str) -> str:
    """Text as HTML."""
    return html_lib.escape(value)
