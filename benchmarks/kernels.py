"""Traffic and speed of the kernels, and step times with each implementation of them.

With a target, each kernel is compiled for it, and the bytes that the compiled program moves are set
against the least possible; no device is needed. Without one, the kernels run on JAX's default
device: they are checked against plain JAX on the CPU and timed against a copy; then steps of models
are timed. On a CPU, sizes are small, and the figures say nothing of a GPU.
"""

import argparse
import functools
from typing import Any

import jax

import jact.memory
from benchmarks import options, output, speed
from benchmarks.operations import BITS, DTYPES, heading, operations, result, usable
from benchmarks.traffic import traffic
from jact_kernels import implementations
from jact_kernels.bench import Operation

SHAPES = ((512, 512, 768), (2048, 32, 32, 64))
"""Activations of a transformer and of a convolution, of which a TPU cannot even keep the masks on
its chip, where they would cost nothing."""

_COLUMNS: output.Columns = {
    "MiB": output.mib_or_dash("bytes"),
    "/ least": output.number("ratio", ".2f"),
    "kernels": output.number("kernels", "d"),
    "scratch MiB": output.mib_or_dash("scratch_bytes"),
    "equal": lambda row: {True: "yes", False: "NO", None: "-"}[row["equal"]],
    "ms": output.number("milliseconds", ".3f"),
    "of copy": output.number("copy_fraction", ".2f"),
    "/ off": output.number("off_ratio", ".2f"),
}


def show(rows: list[dict[str, Any]], path: str | None) -> None:
    """Writes the results, with a column for each figure that any of them has."""
    columns = {
        name: cell for name, cell in _COLUMNS.items() if any(cell(row) != "-" for row in rows)
    }
    title = f"kernels, {rows[0]['target']}" if rows else "kernels"
    output.write(title, rows, columns, path, heading=heading, line="implementation")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command, which shares none with the others."""
    targets = ("cpu", *jact.memory.TARGETS)
    parser.add_argument("--target", choices=targets, help="compile for it and run nothing")
    choices = {
        "implementations": implementations.NAMES[1:],
        "dtypes": tuple(DTYPES),
        "bits": BITS,
    }
    for name, allowed in choices.items():
        parser.add_argument(
            f"--{name}",
            type=options.names(name, allowed),
            default=",".join(allowed),
            help=f"comma-separated: {', '.join(allowed)}",
        )
    parser.add_argument("--seconds", type=options.positive, default=220, help="begin nothing later")


def run(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the results, one for each operation and implementation."""
    if chosen.target is None:
        return list(speed.measure(chosen))
    if jax.config.jax_platforms is None:
        # Nothing runs on a device, so JAX need not look for one.
        jax.config.update("jax_platforms", "cpu")
    platform = "cpu" if chosen.target == "cpu" else jact.memory.TARGETS[chosen.target].platform
    return [
        compiled(operation, implementation, chosen.target)
        for shape in SHAPES
        for operation in operations(shape, chosen)
        for implementation in usable(operation, platform, chosen.implementations)
    ]


def compiled(operation: Operation, implementation: str, target: str) -> dict[str, Any]:
    """Compiles an operation and returns what it moves.

    Args:
        operation: What to compile.
        implementation: Which implementation of it.
        target: One of `jact.memory.TARGETS`, or "cpu".
    """
    analysis = jact.memory.analyze(
        functools.partial(operation.call, implementation=implementation),
        *operation.arguments,
        target=None if target == "cpu" else target,
    )
    moved = traffic(analysis.compiled.as_text())
    return result(
        operation.name,
        operation.label,
        implementation,
        target,
        bytes=moved.bytes,
        ratio=moved.bytes / operation.least_bytes,
        kernels=moved.kernels,
        scratch_bytes=analysis.temp_bytes,
    )
