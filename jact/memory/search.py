"""The largest integer whose cost stays within a limit, in few evaluations of the cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

# Larger than any limit.
_ANY = 2**62


@dataclasses.dataclass(frozen=True)
class Probe:
    """One compiled size.

    Attributes:
        size: the batch size, or whatever integer is searched for.
        bytes: the memory that the step of this size needs on one device; None where the compiler
            itself refused it, for want of memory or for other reasons.
        fixed_bytes: the part that is known not to grow with the size; a first guess alone.
        refused: what the compiler said of a size that it cannot compile, though of smaller ones it
            can; empty otherwise.
    """

    size: int
    bytes: int | None
    fixed_bytes: int = 0
    refused: str = ""


def search(
    measure: Callable[[int], Probe],
    memory: int,
    *,
    start: int = 1,
    multiple: int = 1,
    limit: int = 2**20,
    tolerance: float = 0.0,
) -> list[Probe]:
    """Brackets the largest size that fits.

    Memory is nearly affine in the batch size, so a line through two probes predicts the answer. The
    prediction is compiled and corrected until a size fits and the next one does not.

    Args:
        measure: compiles one size.
        memory: what fits, in bytes.
        start: the first size that is tried.
        multiple: sizes are multiples of it, starting with itself.
        limit: no larger size is tried.
        tolerance: how far the largest size that fits and the smallest that does not may lie apart,
            as a share of the former. With 0, they are neighbours.

    Returns:
        All probes, in the order in which they were made. The answer is the largest that fits; none
        does if not even `multiple` fits.

    >>> probes = search(lambda n: Probe(n, 700 + 30 * n), memory=2000, start=8)
    >>> [probe.size for probe in probes]
    [8, 17, 43, 44]
    """
    probes: list[Probe] = []
    low, high = 0, limit // multiple + 1  # in multiples: the largest that fits, the least that not
    size = min(max(start // multiple, 1), high - 1)
    moves, nudged = {True: 1, False: 1}, False
    while True:
        probe = measure(size * multiple)
        probes.append(probe)
        fits = probe.bytes is not None and probe.bytes <= memory
        low, high = (size, high) if fits else (low, size)
        step = max(1, int(tolerance * low))
        if high - low <= step:
            return probes
        # Near the answer a prediction says "one more" time and again where memory grows in steps.
        # So the end of the bracket that moves by the least again moves four times as far.
        moves[fits] = 4 * moves[fits] if nudged else 1
        moves[not fits] = 1
        least, most = low + max(step, moves[True]), high - moves[False]
        size = _predict(probes, memory) // multiple
        if high > limit // multiple:
            size = min(size, most)
        nudged = not least < size < most
        if not low <= size <= high or least > most:
            size = (low + high) // 2
        else:
            size = min(max(size, least), most)


def _predict(probes: list[Probe], memory: int) -> int:
    """The size at which a line through the best two probes reaches the memory."""
    known = [p for p in probes if p.bytes is not None]
    if not known:
        return probes[-1].size // 2
    nearest = sorted(known, key=lambda p: abs((p.bytes or 0) - memory))
    first, *others = nearest
    size, cost = first.size, first.bytes or 0
    if others:
        run, rise = others[0].size - size, (others[0].bytes or 0) - cost
    else:
        run, rise = size, cost - first.fixed_bytes
    if run < 0:
        run, rise = -run, -rise
    if rise <= 0:
        # Memory does not grow: then anything fits, or nothing.
        return _ANY if cost <= memory else size // 2
    return max(0, size + (memory - cost) * run // rise)
