"""Random programs: is the forward pass exact, are gradients right, is nothing saved twice?

Each program is drawn from a number of its own: `--seed N --programs 1` draws it again. What fails
is shrunk, and printed as a file that runs by itself.

Checks: the value is plain JAX's; the gradient is, where everything is kept; it is nearly so with 24
bits, and close with 8; nothing is saved in full beside its code, and no more than JAX saves.
Programs that amplify rounding errors by themselves are told apart from faults by the 24 bits.
"""

import argparse
import collections
import time
from collections.abc import Sequence
from typing import Any

import jax
import rich.console
import rich.progress

from benchmarks import options, output
from benchmarks.fuzz.checks import Finding, check
from benchmarks.fuzz.generate import draw
from benchmarks.fuzz.program import Program
from benchmarks.fuzz.shrink import shrink

LINE = "outcome"
COLUMNS: output.Columns = {
    "programs": output.number("programs", "d"),
    "share": output.number("share", ".1%"),
}
MOST_FAILURES = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--minutes", type=float, default=1.0, help="no program begins later")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=options.positive, help="how many; None for no limit")
    parser.add_argument("--shrink-seconds", type=float, default=120, help="for each failure")
    parser.add_argument("--show", action="store_true", help="print every program")


def run(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks programs until the time is up, and returns a row for each kind of outcome."""
    options.use_cpu()
    end = time.monotonic() + 60 * chosen.minutes
    outcomes: collections.Counter[str] = collections.Counter()
    chosen.failures = []
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(), console=console
    ) as bars:
        bar = bars.add_task("programs", total=chosen.programs)
        seed = chosen.seed
        while time.monotonic() < end and sum(outcomes.values()) != chosen.programs:
            program = draw(seed)
            if chosen.show:
                print(f"# program {seed}{', wrapped' * program.wrapped}\n{program.source()}")
            finding = check(program)
            outcomes["passes" if finding is None else outcome(finding)] += 1
            if finding is not None and finding.fault:
                program, finding = shrunk(program, finding, chosen.shrink_seconds)
                chosen.failures.append(seed)
                print(failure(seed, program, finding), flush=True)
                if len(chosen.failures) == MOST_FAILURES:
                    break
            # What was compiled is not needed again.
            jax.clear_caches()
            bars.update(bar, advance=1, description=f"program {seed}, failures {failed(chosen)}")
            seed += 1
    number = sum(outcomes.values())
    return [
        {"label": "fuzz", "outcome": name, "programs": count, "share": count / number}
        for name, count in outcomes.most_common()
    ]


def failed(chosen: argparse.Namespace) -> str:
    return ", ".join(map(str, chosen.failures)) or "none"


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Exits with an error if a program failed.

    Raises:
        SystemExit: with the failed programs' seeds.
    """
    del rows
    if chosen.failures:
        raise SystemExit(
            f"failed: programs {failed(chosen)}; draw one again by --seed N --programs 1"
        )


def outcome(finding: Finding) -> str:
    return finding.kind if finding.fault else f"{finding.kind}, no fault"


def shrunk(program: Program, finding: Finding, seconds: float) -> tuple[Program, Finding]:
    """The shortest program found with the same kind of finding, and what that one says."""
    last = finding

    def fails(smaller: Program) -> bool:
        nonlocal last
        try:
            own = check(smaller)
        except Exception:  # A step that is left does not fit; plain JAX raises.
            return False
        if own is None or own.kind != finding.kind or not own.fault:
            return False
        last = own
        return True

    return shrink(program, fails, seconds), last


def failure(seed: int, program: Program, finding: Finding) -> str:
    """What is printed of a failure."""
    policy = "keep" if finding.kind in ("keep", "forward") else "int8"
    head = f"# program {seed} fails: {finding.kind}: {finding.text}"
    return f"{head}\n{program.script(policy)}"
