"""What a report's figures say about what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jact import codecs
from jact.memory.report_groups import grouped, largest_first
from jact.memory.report_rows import Row
from jact.memory.sizes import format_bytes

if TYPE_CHECKING:
    from jact.memory.report import Report

# What is too little to be worth a word.
_SHARE = 0.1
# The next fewer bits.
_FEWER = {"int8": "int4", "int4": "int2", "int2": "int1", "bf16": "int8", "fp8": "int4"}


def sentences(report: Report) -> Iterator[str]:
    """What holds the peak, and what could be saved next."""
    if report.policy == "off" or not report.rows:
        return
    if report.peak is not None and report.peak.phase:
        yield _holds_the_peak(report)
    yield from _next(report)


def _holds_the_peak(report: Report) -> str:
    peak = report.peak
    assert peak is not None
    early, late = format_bytes(peak.forward_bytes), format_bytes(peak.backward_bytes)
    where = f", the most of it in {peak.module}" if peak.module else ""
    if peak.phase != "backward":
        return f"The peak is in the forward pass, where {early} are live{where}."
    words = f"At the peak, in the backward pass, {early} are from the forward pass"
    if peak.backward_bytes > peak.forward_bytes:
        return (
            f"{words}, and {late} are needed there for a moment{where}: smaller codes would save "
            "little. A smaller batch, or a layer split into steps, would."
        )
    return f"{words}{where}, and {late} are needed there for a moment: smaller codes would help."


def _next(report: Report) -> Iterator[str]:
    saved = report.saved_bytes
    kept = [row for row in report.rows if row.kind == "activation"]
    if sum(row.saved_bytes for row in kept) > _SHARE * saved:
        largest = max(kept, key=lambda row: row.saved_bytes)
        size = format_bytes(sum(row.saved_bytes for row in kept))
        what = "the activation" if len(kept) == 1 else f"the {len(kept)} activations"
        yield (
            f"Next: {what} kept as {'it is' if len(kept) == 1 else 'they are'} ({size}) could be "
            f"encoded; the largest is {largest.name} ({largest.why})."
        )
        return
    encoded = [row for row in report.rows if row.kind == "code" and row.codec in _FEWER]
    if sum(row.saved_bytes for row in encoded) <= _SHARE * saved:
        return
    group = largest_first(grouped(encoded, "codec"))[0]
    fewer = _FEWER[group.name]
    members = [row for row in encoded if row.codec == group.name]
    then = sum(_bytes_with(fewer, row) for row in members)
    less = group.saved_bytes - then
    if less > _SHARE * saved:
        yield (
            f"Next: the same values in {fewer} instead of {group.name} would take "
            f"{format_bytes(less)} less{_in_modules(members, less)}."
        )


def _bytes_with(preset: str, row: Row) -> int:
    """What a row would take under a preset, or takes now where that stores no such arrays."""
    codec, dtype = codecs.resolve(preset), np.dtype(row.dtype)
    if row.offloaded or not codec.supports(row.shape, dtype):
        return row.saved_bytes
    # In a loop a row stands for the arrays of all iterations.
    once = int(np.prod(row.shape, dtype=np.int64)) * dtype.itemsize
    times = row.bytes // once if once else 1
    return min(row.saved_bytes, codec.nbytes(row.shape, dtype) * max(times, 1))


def _in_modules(rows: Sequence[Row], less: int) -> str:
    """Where to begin: the module that holds the most, if it is a good part of the whole."""
    deepest = largest_first(grouped(rows, "module", 2))
    total = sum(row.saved_bytes for row in rows)
    if len(deepest) < 2 or not deepest[0].name or deepest[0].saved_bytes < 0.2 * total:
        return ""
    share = deepest[0].saved_bytes / total
    return f", {format_bytes(round(less * share))} of it in {deepest[0].name}"
