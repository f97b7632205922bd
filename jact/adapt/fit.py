"""Plans whose compiled peak fits, found with few compilations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jact.adapt.allocate import Allocation
from jact.adapt.budget import Landscape
from jact.memory.sizes import format_bytes

#: How much of the budget may be left unused. Closing the gap would take a further compilation.
_SLACK = 0.03

#: Compilations at most, for one plan.
_TRIES = 5


class InfeasibleMemoryError(ValueError):
    """No plan's peak fits the budget.

    Attributes:
        smallest: the smallest peak that there is, in bytes.
    """

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


@dataclasses.dataclass(frozen=True)
class Model:
    """How the compiled peak depends on the bytes of the codes: `base + slope * nbytes`."""

    base: float
    slope: float = 1.0

    def nbytes(self, peak: float) -> int:
        """The bytes of codes that go with a peak."""
        return int((peak - self.base) / self.slope)

    @classmethod
    def through(cls, points: dict[int, int]) -> Model:
        """The line through the two last measured points, by bytes of codes; or one of slope 1."""
        (x, y), *rest = reversed(points.items())
        slope = 1.0
        if rest:
            x0, y0 = rest[0]
            # What the codes share with transient arrays makes slopes below one; above two is noise.
            slope = min(max((y - y0) / (x - x0), 0.25), 2.0)
        return cls(y - slope * x, slope)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A plan that fits.

    Attributes:
        allocation: the choice.
        peak: its compiled peak, in bytes.
        model: what has been learnt about peaks.
        compiled: how many plans were compiled on the way.
    """

    allocation: Allocation
    peak: int
    model: Model
    compiled: int


def fit(
    landscape: Landscape,
    limit: int,
    peak_of: Callable[[Allocation], int],
    model: Model | None = None,
    what_holds: Callable[[], str] = lambda: "",
) -> Fit:
    """Finds the plan of least error whose compiled peak is within a limit.

    Predicts the bytes of codes that go with the limit, compiles the best plan of so many bytes,
    corrects the prediction by its peak, and so on, until a plan fits and uses 97 % of the limit, or
    no better plan is left, or five were compiled.

    Args:
        landscape: the residuals.
        limit: the peak, in bytes.
        peak_of: compiles a choice and returns its peak in bytes; compiling it again costs nothing.
        model: what is known about peaks from before.
        what_holds: says what the smallest peak consists of.

    Raises:
        InfeasibleMemoryError: when the plan with the fewest bytes has a larger peak.
    """
    smallest, largest = (
        landscape.allocate(landscape.smallest),
        landscape.allocate(landscape.largest),
    )
    model = model or Model(limit - landscape.uniform_bytes(4))
    points: dict[int, int] = {}
    best: tuple[Allocation, int] | None = None
    while len(points) < _TRIES:
        allocation = landscape.allocate_for(model.nbytes(limit))
        over = [n for n, peak in points.items() if peak > limit]
        if over and allocation.nbytes >= min(over):
            # The line has led back to what is too large; go halfway to what is not.
            allocation = landscape.allocate((min(over) + smallest.nbytes) // 2)
        if allocation.nbytes in points:
            break
        peak = peak_of(allocation)
        points[allocation.nbytes] = peak
        model = Model.through(points)
        if peak <= limit and (best is None or allocation.error < best[0].error):
            best = allocation, peak
            if peak >= (1 - _SLACK) * limit or allocation.nbytes == largest.nbytes:
                break
    if best is None:
        peak = points.get(smallest.nbytes) or peak_of(smallest)
        points[smallest.nbytes] = peak
        if peak > limit:
            raise InfeasibleMemoryError(
                f"memory={format_bytes(limit)} is too little: the smallest peak is "
                f"{format_bytes(peak)}, with {format_bytes(smallest.nbytes)} of codes"
                f"{what_holds()}",
                peak,
            )
        best = smallest, peak
    return Fit(best[0], best[1], model, len(points))
