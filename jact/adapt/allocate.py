"""Which codec for which residual: a multiple-choice knapsack.

Each residual takes one of its candidates, which has an error and a size in bytes. The errors add
up, so do the bytes; wanted is the least error within a budget of bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy import optimize, sparse

from jact.memory.sizes import format_bytes

type Method = Literal["auto", "exact", "greedy"]

METHODS: tuple[Method, ...] = ("auto", "exact", "greedy")

#: Up to this many choices in all "auto" is "exact"; that takes well under a second.
_EXACT_CHOICES = 1000

#: When the exact search ends, a bound on the remaining error or not. A number of nodes, not of
#: seconds, so that the result does not depend on how busy the machine is.
_NODES = 20000

#: What the greedy solution's error is scaled to. The solver takes 1e-6 for nothing.
_SCALE = 1e6


class InfeasibleBudgetError(ValueError):
    """No choice fits the budget.

    Attributes:
        smallest: the least budget that can be met, in bytes.
    """

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """One candidate for each residual.

    Attributes:
        choice: for each residual the position of its candidate.
        error: the sum of the chosen errors.
        nbytes: the sum of the chosen bytes; never more than the budget.
        bound: what no choice within the budget can be below; equals `error` (up to 1e-9 of it)
            where the solution is exact.
    """

    choice: tuple[int, ...]
    error: float
    nbytes: int
    bound: float


def allocate(error: Any, nbytes: Any, budget: int, *, method: Method = "auto") -> Allocation:
    """Chooses one candidate for each residual, with the least total error within a budget.

    A larger budget never gives a larger error, with either method (up to 1e-9 of it, to which the
    exact solution is computed).

    *exact* solves the integer program with `scipy.optimize.milp`.

    *greedy* walks along the lower convex hulls. Of each residual's candidates as points (bytes,
    error), only those on the lower convex hull are considered, from the smallest on. A step goes
    from one point of a hull to the next; its slope is the error that it saves per byte. All steps
    of all residuals are taken in the order of falling slope, until one does not fit.

    - It is within the error saved by that one step of the least error. Proof: let the choice be
      fractional, that is a convex combination of each residual's candidates. Its least error at
      given bytes is on the hulls, where slopes fall along each residual, so taking all steps in the
      order of falling slope, the last one in part, is the best (an exchange of any two parts of
      steps against that order would not save more). No choice is better than the best fractional
      one, which differs from the greedy one by a part of one step.
    - It is monotone: under a larger budget the same steps are taken, and perhaps some more.

    Args:
        error: float `[residual, candidate]`: at least 0; infinite or NaN where it cannot be taken.
        nbytes: int `[residual, candidate]`: bytes of each candidate.
        budget: bytes that all together may take.
        method: "exact", "greedy", or "auto", which is exact for up to some hundred residuals.

    Returns:
        The allocation. An exact search that has not ended after 20000 nodes returns the best it
        has found and its bound; the greedy solution is among what it has found.

    Raises:
        InfeasibleBudgetError: when not even the smallest candidates fit.
        ValueError: for arrays of different shapes, a residual without candidates, or an unknown
            method.

    References:
        Kellerer, Pferschy and Pisinger, Knapsack Problems (Springer, 2004), chapter 11.
        Liu et al., GACT (ICML 2022), section 5.2, which allocates bits by the same objective.

    >>> from jact.adapt.allocate import allocate
    >>> error = [[0.0, 1.0, 4.0], [0.0, 5.0, 9.0]]
    >>> nbytes = [[400, 100, 50], [400, 100, 50]]
    >>> allocate(error, nbytes, 500).choice
    (1, 0)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    problem = _Problem(error, nbytes, budget)
    greedy = problem.greedy()
    choices = sum(len(row) for row in problem.candidates)
    if method == "greedy" or (method == "auto" and choices > _EXACT_CHOICES):
        return greedy
    return problem.exact(greedy)


class _Problem:
    """A knapsack, without the candidates that another one of the same residual beats in both."""

    def __init__(self, error: Any, nbytes: Any, budget: int):
        self.error = np.array(error, np.float64, ndmin=2)
        self.nbytes = np.array(nbytes, np.int64, ndmin=2)
        if self.error.shape != self.nbytes.shape:
            raise ValueError(
                "error and nbytes must have one shape [residual, candidate], got "
                f"{self.error.shape} and {self.nbytes.shape}"
            )
        if self.error.size == 0:
            self.error = self.error.reshape(0, 0)
        self.budget = int(budget)
        self.candidates = [self._undominated(i) for i in range(len(self.error))]
        smallest = sum(int(self.nbytes[i, row[0]]) for i, row in enumerate(self.candidates))
        if smallest > self.budget:
            raise InfeasibleBudgetError(
                f"the budget of {format_bytes(self.budget)} is below {format_bytes(smallest)}, "
                "what the residuals take with the smallest of their candidates",
                smallest,
            )

    def _undominated(self, residual: int) -> list[int]:
        """Positions of candidates, by growing size and strictly falling error."""
        error, nbytes = self.error[residual], self.nbytes[residual]
        usable = np.flatnonzero(np.isfinite(error))
        if not usable.size:
            raise ValueError(f"residual {residual} has no candidate of finite error")
        if (error[usable] < 0).any():
            raise ValueError(f"errors must not be negative, got {error[usable].min()}")
        kept: list[int] = []
        for i in usable[np.lexsort((error[usable], nbytes[usable]))]:
            if not kept or error[i] < error[kept[-1]]:
                kept.append(int(i))
        return kept

    def allocation(self, choice: Sequence[int], bound: float) -> Allocation:
        rows = np.arange(len(choice))
        error = float(self.error[rows, list(choice)].sum())
        nbytes = int(self.nbytes[rows, list(choice)].sum())
        return Allocation(
            choice=tuple(choice), error=error, nbytes=nbytes, bound=min(max(bound, 0.0), error)
        )

    def greedy(self) -> Allocation:
        steps = []
        for i, row in enumerate(self.candidates):
            hull = _lower_hull(row, self.nbytes[i], self.error[i])
            slope = np.inf
            for order, (a, b) in enumerate(zip(hull, hull[1:], strict=False)):
                size = int(self.nbytes[i, b] - self.nbytes[i, a])
                saved = float(self.error[i, a] - self.error[i, b])
                # Rounding must not put two steps of one residual out of order.
                slope = min(slope, saved / size)
                steps.append((-slope, i, order, b, size, saved))
        choice = [row[0] for row in self.candidates]
        room = self.budget - sum(int(self.nbytes[i, c]) for i, c in enumerate(choice))
        for _, i, _, candidate, size, saved in sorted(steps):
            if size > room:
                bound = self.allocation(choice, 0.0).error - saved * room / size
                return self.allocation(choice, bound)
            choice[i] = candidate
            room -= size
        return self.allocation(choice, np.inf)

    def exact(self, greedy: Allocation) -> Allocation:
        if greedy.error <= greedy.bound:
            return greedy
        # A candidate that alone errs more than the greedy choice is in no better one.
        rows = [[c for c in r if self.error[i, c] <= greedy.error] for i, r in self._rows()]
        owner = np.concatenate([np.full(len(row), i) for i, row in enumerate(rows)])
        column = np.concatenate(rows)
        cost = self.error[owner, column] * (_SCALE / greedy.error)
        size = self.nbytes[owner, column]
        one_each = sparse.csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
        best, bound, limit = greedy, greedy.bound, self.budget
        while True:
            result = optimize.milp(
                cost,
                integrality=np.ones_like(cost),
                bounds=optimize.Bounds(0, 1),
                constraints=[
                    optimize.LinearConstraint(one_each, 1, 1),
                    optimize.LinearConstraint(
                        size[None] / self.budget, -np.inf, limit / self.budget
                    ),
                ],
                options={"mip_rel_gap": 0.0, "node_limit": _NODES},
            )
            if limit == self.budget and result.mip_dual_bound is not None:
                bound = max(bound, float(result.mip_dual_bound) * greedy.error / _SCALE)
            if result.x is None:
                break
            chosen = column[np.flatnonzero(result.x > 0.5)]
            found = self.allocation([int(c) for c in chosen], bound)
            if found.nbytes > self.budget:
                # The solver's tolerance let a little too much in; all that fits is below this.
                limit -= found.nbytes - self.budget
                continue
            best = min(best, found, key=lambda a: a.error)
            break
        return self.allocation(best.choice, bound)

    def _rows(self) -> list[tuple[int, list[int]]]:
        return list(enumerate(self.candidates))


def _lower_hull(row: Sequence[int], nbytes: np.ndarray, error: np.ndarray) -> list[int]:
    """The candidates on the lower convex hull, by growing size; `row` is sorted so."""
    hull: list[int] = []
    for c in row:
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            # b lies on or above the line from a to c.
            rise = (error[b] - error[a]) * float(nbytes[c] - nbytes[a])
            if rise < (error[c] - error[a]) * float(nbytes[b] - nbytes[a]):
                break
            hull.pop()
        hull.append(c)
    return hull
