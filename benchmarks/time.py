"""Run time of one gradient, as a ratio to plain JAX on the same machine.

All policies are compiled first and then run in turn, round after round, so that whatever else the
machine does slows them alike. The ratio is the median of the rounds' ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import output
from benchmarks.options import Case, positive

COLUMNS: output.Columns = {
    "median s": output.number("seconds_median", ".4f"),
    "/ off": output.number("ratio", ".2f"),
    "lowest": output.number("ratio_min", ".2f"),
    "highest": output.number("ratio_max", ".2f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--rounds", type=positive, default=7, help="how often each policy runs")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case."""
    arguments = case.task("off").arguments()
    compiled = {}
    # Ratios need "off", whether or not it is asked for.
    for policy in dict.fromkeys(("off", *case.policies)):
        output.announce(f"compiling {case.model} with {policy}")
        compiled[policy] = jax.jit(case.gradient(policy)).lower(*arguments).compile()
    seconds = interleave(compiled, arguments, chosen.rounds)
    for policy in case.policies:
        ratios = [own / plain for own, plain in zip(seconds[policy], seconds["off"], strict=True)]
        yield case.row(
            policy,
            jax.default_backend(),
            seconds_median=statistics.median(seconds[policy]),
            ratio=statistics.median(ratios),
            ratio_min=min(ratios),
            ratio_max=max(ratios),
        )


def interleave(
    functions: dict[str, Callable[..., Any]],
    arguments: Sequence[Any],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Runs each function once per round, after one round that is not counted.

    Args:
        functions: The functions by name.
        arguments: The arguments of all of them.
        rounds: How many rounds are counted.
        clock: Tells the time.

    Returns:
        The seconds of each function, by name, round by round.
    """
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        output.announce(f"round {i} of {rounds}" if i else "warming up")
        # Each round begins with another function, since the first may find colder caches.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = clock()
            jax.block_until_ready(functions[name](*arguments))
            if i:
                seconds[name].append(clock() - start)
    return seconds
