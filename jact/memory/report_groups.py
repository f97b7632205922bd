"""Totals of a report's rows: by module, by kind, by codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jact.memory.report_rows import Row

_KEYS = ("module", "kind", "codec", "why")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of a report that have something in common.

    Attributes:
        name: what they have in common; empty for what belongs to no module.
        rows: the rows themselves.
    """

    name: str
    rows: tuple[Row, ...] = dataclasses.field(repr=False)

    @property
    def values(self) -> int:
        """How many there are."""
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """Their own size."""
        return sum(row.bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """What is saved of them."""
        return sum(row.saved_bytes for row in self.rows)


def grouped(rows: Iterable[Row], by: str, depth: int | None = None) -> list[Group]:
    """Totals of the rows that have something in common, in the order in which they come up.

    Args:
        rows: the rows.
        by: "module", "kind", "codec" or "why".
        depth: how many parts of a module's path to tell apart; all when None.

    Raises:
        ValueError: `by` is none of these, or `depth` is below 1.
    """
    if by not in _KEYS:
        raise ValueError(f"by must be one of {', '.join(_KEYS)}; got {by!r}")
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    members: dict[str, list[Row]] = {}
    for row in rows:
        name = getattr(row, by)
        if by == "module":
            name = "/".join(name.split("/")[:depth])
        members.setdefault(name, []).append(row)
    return [Group(name=name, rows=tuple(group)) for name, group in members.items()]


def largest_first(groups: Iterable[Group]) -> list[Group]:
    """Sorts groups by what is saved of them."""
    return sorted(groups, key=lambda group: (-group.saved_bytes, -group.bytes))


def by_layer(rows: Sequence[Row], most: int) -> list[Group]:
    """Totals by module, as deep as leaves no more than so many of them; one level at least.

    Args:
        rows: the rows.
        most: how many groups there may be.
    """
    chosen = grouped(rows, "module", 1)
    for depth in range(2, max((row.module.count("/") + 2 for row in rows), default=2)):
        deeper = grouped(rows, "module", depth)
        if len(deeper) > most:
            break
        chosen = deeper
    return chosen
