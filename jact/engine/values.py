"""Values of a forward pass, and the graph that they form."""

from __future__ import annotations

import dataclasses
from typing import Any

from jact import compat
from jact.codecs import Codec
from jact.engine.marks import Mark
from jact.engine.origins import Origin
from jact.engine.program import Var
from jact.engine.storage import raw_bytes


@dataclasses.dataclass(frozen=True)
class Value:
    """One made value of the forward pass.

    Attributes:
        var: its variable in the forward program.
        path: module path and primitive of the equation that made it.
        source: where the equation that made it comes from; None for an input.
        pinned: why it is never made again from saved values; empty when it may be.
        roots: the pinned, inexactly stored values that it would be made from.
        exact: why it would be saved exactly; empty when a codec would store it.
        codec: what would store it.
        origin: see `Origin`; otherwise the argument of `Input.argument`.
        rerun: whether an expensive operation that is run again stands between it and its roots.
        mixed: whether it is put together of inexact and exact pieces (a class token before patches,
            zeros around an image) and so may hold parts of very different size.
        steep: whether a singular function reads how little a saturated value is away from a
            constant, so that the error of a code is magnified.
        marks: of what it is a code, when a compressed function inside of this one made it.
    """

    var: Var
    path: str
    source: Any
    pinned: str
    roots: frozenset[Var]
    exact: str
    codec: Codec
    origin: Origin | int
    rerun: bool
    mixed: bool = False
    steep: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def aval(self) -> Any:
        """The type of the value."""
        return self.var.aval

    @property
    def line(self) -> str:
        """The user's line that made it; looked up when asked for, as few values are saved."""
        if self.marks:
            return self.marks[0].line
        return compat.source_line(self.source) if self.source is not None else ""

    @property
    def raw_bytes(self) -> int:
        """Bytes of the value itself."""
        return raw_bytes(self.aval)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its code."""
        return self.codec.nbytes(self.aval.shape, self.aval.dtype)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The made values of a function's forward pass.

    Attributes:
        values: by variable, in the order in which they are made.
        names: the names of the pinned values.
        edges: pairs (operand, result) of made values where the result is cheap to make again from
            the operands.
        rerun: results of expensive operations that are run again.
        candidates: full name, shape and dtype of all that the policy was asked about.
    """

    values: dict[Var, Value]
    names: dict[Var, str]
    edges: list[tuple[Var, Var]]
    rerun: set[Var]
    candidates: list[tuple[str, tuple[int, ...], Any]]
