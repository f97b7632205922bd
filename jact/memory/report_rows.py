"""The rows of a report: one for each value that the backward pass saves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from jact import codecs, compat
from jact.engine import backward, costs, marks
from jact.engine import program as programs
from jact.engine.compressed import Prepared
from jact.engine.linearize import Linearized
from jact.engine.marks import Mark
from jact.engine.names import module_path, numbered
from jact.engine.origins import Origin, origin_of_input, origin_of_result
from jact.engine.program import Equation, Var
from jact.engine.select import Saved
from jact.engine.storage import raw_bytes
from jact.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One value that is saved for the backward pass.

    Attributes:
        name: the residual's name, which rules match: module path, primitive, index.
        kind: what it is:
            - "code": a codec stores it, and the backward pass reads what the codec gives back;
            - "activation": saved as it is;
            - "mask": booleans;
            - "parameter": made of parameters alone, such as a merged weight;
            - "small": saved as it is, for it is a statistic or takes less than 16 KiB.
        line: the user's line that made it, as `file.py:12 (function)`; empty for an argument, or
            where JAX does not know.
        shape: its shape.
        dtype: its dtype, by name.
        bytes: its own size, as XLA stores it (a boolean is a byte, a uint4 half of one).
        codec: the name of the codec that stores it; "keep" for the array as it is.
        saved_bytes: what is saved of it.
        exact: whether the backward pass sees the value that the forward pass made, bit for bit.
        why: why it is exact or, if it is not, why it is saved rather than made again from others.
        offloaded: whether what is saved of it is sent to host memory.
    """

    name: str
    kind: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    codec: str
    saved_bytes: int
    exact: bool
    why: str
    offloaded: bool = False

    @property
    def module(self) -> str:
        """The path of the module that makes it; empty if none does."""
        return self.name.rpartition("/")[0]


def compressed_rows(prepared: Prepared) -> list[Row]:
    """One row for each residual; the arrays of a code that was made inside make up one."""
    rows: dict[str, Row] = {}
    for entry in prepared.saved:
        if not entry.value.marks:
            rows[entry.name] = _row(entry)
        for mark in entry.value.marks:
            # What a user compressed may be called more than once, and entries are numbered; of one
            # code, the first array comes first.
            latest = next(reversed(rows), entry.name)
            name = mark.name if mark.in_loop else entry.name if mark.part == 0 else latest
            row = rows.get(name) or _marked_row(name, mark)
            # Where branches share a place, it is counted once.
            size = entry.stored_bytes if mark is entry.value.marks[0] else 0
            rows[name] = dataclasses.replace(row, saved_bytes=row.saved_bytes + size)
    return list(rows.values())


def _marked_row(name: str, mark: Mark) -> Row:
    return Row(
        name=name,
        kind=_kind(mark.exact, mark.dtype, mark.raw_bytes),
        line=mark.line,
        shape=mark.shape,
        dtype=mark.dtype,
        bytes=mark.raw_bytes,
        codec=mark.codec.name,
        saved_bytes=0,
        exact=bool(mark.exact),
        why=mark.exact or mark.reason,
        offloaded=isinstance(mark.codec, codecs.Offload),
    )


def _kind(exact: str, dtype: str, size: int, of_weights: bool = False) -> str:
    """The kind of a value, from why it is exact (empty if it is not) and what it is."""
    if not exact:
        return "code"
    if dtype == "bool":
        return "mask"
    if of_weights:
        return "parameter"
    return "small" if exact in ("a statistic", "small") or size < Policy.min_bytes else "activation"


def _row(entry: Saved) -> Row:
    return Row(
        name=entry.name,
        kind=_kind(
            entry.exact,
            str(entry.value.aval.dtype),
            entry.raw_bytes,
            of_weights=isinstance(entry.value.origin, int),
        ),
        line=entry.line,
        shape=tuple(entry.value.aval.shape),
        dtype=str(entry.value.aval.dtype),
        bytes=entry.raw_bytes,
        codec=entry.codec.name,
        saved_bytes=entry.stored_bytes,
        exact=bool(entry.exact),
        why=entry.exact or entry.reason,
        offloaded=isinstance(entry.codec, codecs.Offload),
    )


def plain_residuals(prepared: Prepared) -> list[Var]:
    """What JAX's own backward pass saves: its residuals, less what costs nothing."""
    program = prepared.linearized.forward
    inputs = zip(program.invars, prepared.inputs, strict=True)
    free = {*program.consts, *(var for var, spec in inputs if not spec.encoded)}
    # JAX lists the zeros that a ReLU selects, for one. XLA makes such arrays where it needs them,
    # so to count them would flatter jact.
    varying = {*program.consts, *program.invars}
    for eqn in program.eqns:
        if any(compat.is_var(atom) and atom in varying for atom in eqn.invars):
            varying.update(eqn.outvars)
    return [v for v in _residuals(prepared.linearized) if v in varying and v not in free]


def _residuals(linearized: Linearized) -> list[Var]:
    """The variables among the residuals, each once."""
    variables: list[Any] = [atom for atom in linearized.residuals if compat.is_var(atom)]
    return list(dict.fromkeys(variables))


def plain_rows(prepared: Prepared) -> list[Row]:
    """The residuals of plain JAX, and the codes of what is compressed by itself."""
    program = prepared.linearized.forward
    makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
    inputs = {v: spec.name for v, spec in zip(program.invars, prepared.inputs, strict=True)}
    origins: dict[Var, Origin | int] = dict.fromkeys(program.consts, Origin.DATA)
    origins |= zip(program.invars, map(origin_of_input, prepared.inputs), strict=True)
    for eqn in program.eqns:
        operands = (origins[v] for v in programs.operands(eqn))
        origins |= dict.fromkeys(eqn.outvars, origin_of_result(operands, costs.is_expensive(eqn)))
    counts: Counter[str] = Counter()
    rows: dict[str, Row] = {}
    for var in plain_residuals(prepared):
        aval: Any = var.aval
        size = raw_bytes(aval)
        eqn = makers.get(var)
        found = () if eqn is None else marks.find(eqn, eqn.outvars.index(var))
        base = f"{module_path(eqn)}{found[0].name}" if found else inputs.get(var) or _name(eqn)
        if found and found[0].part:
            # Of one code, the first array comes first.
            name = numbered(base, counts[base] - 1)
        else:
            name = numbered(base, counts[base])
            counts[base] += 1
        row = Row(
            name=name,
            kind=_kind("JAX saves it", str(aval.dtype), size, isinstance(origins[var], int)),
            line=compat.source_line(eqn.source_info) if eqn is not None else "",
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            bytes=size,
            codec="keep",
            saved_bytes=0,
            exact=True,
            why="JAX saves it",
        )
        row = rows.get(name) or (_marked_row(name, found[0]) if found else row)
        rows[name] = dataclasses.replace(row, saved_bytes=row.saved_bytes + size)
    return list(rows.values())


def _name(eqn: Equation) -> str:
    tag = eqn.params["name"] if eqn.primitive.name == "name" else eqn.primitive.name
    return f"{module_path(eqn)}{tag}"


def inputs_read(prepared: Prepared, off: bool) -> list[int]:
    """Positions of the inputs that the backward pass reads as they are."""
    if not off:
        return backward.inputs_read(prepared.linearized, prepared.saved)
    read = set(_residuals(prepared.linearized)) - set(plain_residuals(prepared))
    return [i for i, var in enumerate(prepared.linearized.forward.invars) if var in read]
