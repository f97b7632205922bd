"""The search for the largest size: always right, and in few compilations."""

import statistics
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st

from jact.memory.search import Probe, search

LIMIT = 4096


def run(cost: Callable[[int], int | None], memory: int, **options: float) -> list[Probe]:
    return search(lambda n: Probe(n, cost(n)), memory, limit=LIMIT, **options)  # type: ignore[arg-type]


def answer(probes: list[Probe], memory: int) -> int:
    return max((p.size for p in probes if p.bytes is not None and p.bytes <= memory), default=0)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    fixed=st.integers(0, 3000),
    slope=st.floats(0.1, 300),
    curve=st.sampled_from([0.0, 0.0, 0.01, 0.1]),
    # XLA rounds sizes up, so that memory grows in steps.
    grain=st.sampled_from([1, 1, 64, 256]),
    memory=st.integers(1, 200_000),
    start=st.sampled_from([1, 8, 64, 5000]),
    multiple=st.sampled_from([1, 1, 8]),
    tolerance=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
)
def test_finds_the_largest(
    fixed: int,
    slope: float,
    curve: float,
    grain: int,
    memory: int,
    start: int,
    multiple: int,
    tolerance: float,
) -> None:
    def cost(n: int) -> int:
        return int(fixed + slope * n + curve * n * n) // grain * grain

    probes = run(cost, memory, start=start, multiple=multiple, tolerance=tolerance)
    sizes = [p.size for p in probes]
    assert len(set(sizes)) == len(sizes)
    assert all(0 < n <= LIMIT and n % multiple == 0 for n in sizes)
    largest = max((n for n in range(multiple, LIMIT + 1, multiple) if cost(n) <= memory), default=0)
    found = answer(probes, memory)
    assert found <= largest <= found + max(tolerance * found, 0)


def test_takes_four_compilations_where_memory_is_affine() -> None:
    counts = []
    for fixed in (0, 500, 5000):
        for slope in (5, 17, 101):
            probes = run(lambda n, f=fixed, s=slope: f + s * n, 20_000, start=8)
            assert answer(probes, 20_000) == (20_000 - fixed) // slope
            counts.append(len(probes))
    assert max(counts) <= 4, counts


def test_a_good_guess_and_a_tolerance_save_compilations() -> None:
    def cost(n: int) -> int:
        return 1000 + 50 * n

    assert len(run(cost, 51_000, start=990, tolerance=0.05)) < len(run(cost, 51_000, start=8))


def test_few_where_memory_is_nearly_affine() -> None:
    counts = [
        len(run(lambda n, w=wobble: 700 + 31 * n + 8 * (n % w), 40_000, tolerance=0.01))
        for wobble in range(2, 30)
    ]
    assert statistics.mean(counts) <= 5.5


def test_nothing_fits() -> None:
    probes = run(lambda n: 100 + n, 50)
    assert answer(probes, 50) == 0
    assert min(p.size for p in probes) == 1


def test_everything_fits() -> None:
    probes = run(lambda n: 7, 50)
    assert answer(probes, 50) == LIMIT
    assert len(probes) <= 4


def test_sizes_that_the_compiler_refuses_do_not_fit() -> None:
    probes = run(lambda n: 10 * n if n <= 300 else None, 5000, start=2000)
    assert answer(probes, 5000) == 300


def test_goes_on_beyond_a_size_that_is_out_of_line() -> None:
    """A compiler may plan single sizes much worse than those around them."""

    def cost(n: int) -> int:
        return 1000 + 20 * n + (4000 if 560 < n < 612 else 0)

    probes = run(cost, 14_000, start=600, tolerance=0.02)
    assert 637 <= answer(probes, 14_000) <= 650
    assert len(probes) <= 8
    # If they are out of line as far as the line goes, it gives up.
    probes = run(lambda n: cost(n) + 4000 * (n > 560), 14_000, start=600, tolerance=0.02)
    sizes = [p.size for p in probes]
    assert 550 <= answer(probes, 14_000) <= 560
    assert len(set(sizes)) == len(sizes) <= 9


@pytest.mark.parametrize("limit", [8, 9, 15])
def test_the_limit_holds_with_multiples(limit: int) -> None:
    probes = search(lambda n: Probe(n, n), 10**6, start=100, multiple=8, limit=limit)
    assert [p.size for p in probes] == [8]
