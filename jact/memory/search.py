"""The largest integer whose cost stays within a limit, in few evaluations of the cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

# Larger than any limit.
_ANY = 2**62

# How far above the memory a size lies that is out of line, as a factor, where a line through
# smaller ones says that it fits; and how many times the search goes on beyond one.
_OUT_OF_LINE, _BEYOND = 1.01, 2


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

    def fits(self, memory: int) -> bool:
        """Whether it needs no more than that many bytes."""
        return self.bytes is not None and self.bytes <= memory


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
    prediction is compiled and corrected until a size fits and the next one does not. Where that one
    needs far more than the line says, the search goes on beyond it.

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
    first = min(max(start // multiple, 1), limit // multiple)
    bracket = _Bracket(measure, memory, multiple, limit // multiple, tolerance, probes)
    bracket.close(first)
    for _ in range(_BEYOND):
        if (size := _beyond(probes, memory, multiple, limit)) is None:
            break
        bracket.close(size // multiple)
    return probes


@dataclasses.dataclass
class _Bracket:
    """The sizes between the largest that fits and the least above it that does not.

    Attributes:
        measure: compiles one size.
        memory: what fits, in bytes.
        multiple: what sizes are multiples of.
        most: the greatest size, in multiples.
        tolerance: how wide the bracket may be, as a share of the size that fits.
        probes: all that were made.
    """

    measure: Callable[[int], Probe]
    memory: int
    multiple: int
    most: int
    tolerance: float
    probes: list[Probe]

    def close(self, size: int) -> None:
        """Measures a size, in multiples, and more until the bracket is narrow enough."""
        moves, nudged = {True: 1, False: 1}, False
        while True:
            probe = self.measure(size * self.multiple)
            self.probes.append(probe)
            fits = probe.fits(self.memory)
            low, high = self._ends()
            step = max(1, int(self.tolerance * low))
            if high - low <= step:
                return
            # Near the answer a prediction says "one more" time and again where memory grows in
            # steps. So the end of the bracket that moves by the least again moves four times as
            # far.
            moves[fits] = 4 * moves[fits] if nudged else 1
            moves[not fits] = 1
            least, most = low + max(step, moves[True]), high - moves[False]
            size = _predict(self.probes, self.memory) // self.multiple
            if high > self.most:
                size = min(size, most)
            nudged = not least < size < most
            if not low <= size <= high or least > most:
                size = (low + high) // 2
            else:
                size = min(max(size, least), most)

    def _ends(self) -> tuple[int, int]:
        """In multiples: the largest that fits, and the least above it that does not."""
        low = max((p.size for p in self.probes if p.fits(self.memory)), default=0)
        high = min((p.size for p in self.probes if p.size > low), default=None)
        return low // self.multiple, self.most + 1 if high is None else high // self.multiple


def _beyond(probes: list[Probe], memory: int, multiple: int, limit: int) -> int | None:
    """A size to try beyond the least that does not fit, where that one is out of line.

    A compiler may plan one size much worse than those around it: fuse less, or leave gaps between
    buffers. The next sizes may fit again.
    """
    fitting = [p for p in probes if p.fits(memory)]
    if len(fitting) < 2:
        return None
    largest = max(p.size for p in fitting)
    above = min((p for p in probes if p.size > largest), key=lambda p: p.size, default=None)
    # On the line it would not exceed the memory by more than a step.
    if above is None or above.bytes is None or above.bytes < _OUT_OF_LINE * memory:
        return None
    expected = min(_predict(fitting, memory), limit)
    for size in (expected, (above.size + expected) // 2):
        size -= size % multiple
        if size > above.size and all(p.size != size for p in probes):
            return size
    return None


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
