"""Allocation: within the budget, monotone in it, and as good as trying everything."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jact.adapt.allocate import InfeasibleBudgetError, allocate


@st.composite
def problems(draw, max_residuals=5, max_candidates=4):
    shape = (draw(st.integers(1, max_residuals)), draw(st.integers(1, max_candidates)))
    # Errors over twelve orders of magnitude, ties and zeros; sizes likewise.
    errors = st.one_of(
        st.integers(0, 3).map(float), st.floats(-9, 3).map(lambda x: 10.0**x), st.just(np.inf)
    )
    error = np.array([[draw(errors) for _ in range(shape[1])] for _ in range(shape[0])])
    error[:, 0] = np.where(np.isfinite(error[:, 0]), error[:, 0], 0.0)
    sizes = st.one_of(st.integers(0, 4), st.integers(1, 10**9))
    nbytes = np.array([[draw(sizes) for _ in range(shape[1])] for _ in range(shape[0])])
    return error, nbytes


def smallest(error, nbytes):
    return int(np.where(np.isfinite(error), nbytes, 2**60).min(1).sum())


@st.composite
def budgets(draw, error, nbytes):
    low = smallest(error, nbytes)
    return low + draw(st.integers(0, int(nbytes.max(1).sum()) - low + 1))


def brute_force(error, nbytes, budget):
    best = np.inf
    rows = np.arange(len(error))
    for choice in itertools.product(range(error.shape[1]), repeat=len(error)):
        if nbytes[rows, list(choice)].sum() <= budget:
            best = min(best, error[rows, list(choice)].sum())
    return best


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.data())
def test_exact_equals_brute_force(data):
    error, nbytes = data.draw(problems())
    budget = data.draw(budgets(error, nbytes))
    found = allocate(error, nbytes, budget, method="exact")
    best = brute_force(error, nbytes, budget)
    rows = np.arange(len(error))
    assert found.nbytes == nbytes[rows, list(found.choice)].sum() <= budget
    assert found.error == error[rows, list(found.choice)].sum()
    np.testing.assert_allclose(found.error, best, rtol=1e-9, atol=1e-15)
    assert found.bound <= best * (1 + 1e-9)


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.data())
def test_greedy_is_within_its_bound(data):
    error, nbytes = data.draw(problems())
    budget = data.draw(budgets(error, nbytes))
    found = allocate(error, nbytes, budget, method="greedy")
    best = brute_force(error, nbytes, budget)
    assert found.nbytes <= budget
    assert found.bound * (1 - 1e-9) <= best <= found.error * (1 + 1e-9)
    finite = np.where(np.isfinite(error), error, 0.0)
    # One step saves at most this, so the proof's bound can be checked without the steps.
    assert found.error - best <= finite.max() * (1 + 1e-9)


@pytest.mark.parametrize("method", ["exact", "greedy"])
@hypothesis.given(data=st.data())
def test_monotone_in_the_budget(method, data):
    error, nbytes = data.draw(problems(max_residuals=12))
    low, high = sorted(data.draw(budgets(error, nbytes)) for _ in range(2))
    less, more = (allocate(error, nbytes, b, method=method) for b in (low, high))
    assert more.error <= less.error * (1 + 1e-9)


def many(residuals, seed=0):
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.uniform(-6, 3, (residuals, 1))
    error = scale * np.array([0, 1, 256, 4096]) * random.uniform(0.8, 1.2, (residuals, 4))
    nbytes = 2 ** random.integers(14, 22, (residuals, 1)) * np.array([64, 17, 9, 5]) // 2
    return error, nbytes


def test_thousands_of_residuals_are_close_to_the_bound():
    error, nbytes = many(5000)
    budget = int(nbytes[:, 2].sum())
    found = allocate(error, nbytes, budget)
    assert found.nbytes <= budget
    assert found.error <= 1.001 * found.bound
    assert found.error < 0.5 * error[:, 2].sum()


def test_exact_is_not_worse_than_greedy():
    for seed in range(5):
        error, nbytes = many(60, seed)
        budget = int(nbytes[:, 2].sum())
        exact, greedy = (allocate(error, nbytes, budget, method=m) for m in ("exact", "greedy"))
        assert greedy.bound <= exact.error <= greedy.error
        np.testing.assert_allclose(exact.bound, exact.error, rtol=1e-6)


def test_the_same_problem_has_the_same_solution():
    error, nbytes = many(60)
    budget = int(nbytes[:, 2].sum())
    assert allocate(error, nbytes, budget) == allocate(error.copy(), nbytes.copy(), budget)


def test_too_small_a_budget_says_what_is_the_smallest():
    with pytest.raises(InfeasibleBudgetError, match=r"2\.0 KiB.* below 3\.0 KiB") as caught:
        allocate([[1.0, 0.0], [1.0, 0.0]], [[1024, 4096], [2048, 4096]], 2048)
    assert caught.value.smallest == 3072


def test_wrong_arguments():
    with pytest.raises(ValueError, match="one shape"):
        allocate([[1.0]], [[1, 2]], 5)
    with pytest.raises(ValueError, match="residual 1 has no candidate"):
        allocate([[1.0], [np.nan]], [[1], [1]], 5)
    with pytest.raises(ValueError, match="must not be negative"):
        allocate([[-1.0]], [[1]], 5)
    with pytest.raises(ValueError, match="one of auto, exact, greedy, got 'fast'"):
        allocate([[1.0]], [[1]], 5, method="fast")  # type: ignore[arg-type]


def test_no_residuals():
    found = allocate(np.zeros((0, 3)), np.zeros((0, 3), int), 10)
    assert found.choice == () and found.error == 0 and found.nbytes == 0
