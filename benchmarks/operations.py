"""The kernels' operations at the sizes that are asked for, and what a result looks like."""

import argparse
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks import output
from jact_kernels import implementations
from jact_kernels.bench import Operation
from jact_kernels.mask import bench as mask
from jact_kernels.pool import bench as pool
from jact_kernels.quantize import bench as quantize

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
BITS = ("8", "4", "2", "1")

FIGURES = (
    "bytes",
    "ratio",
    "kernels",
    "scratch_bytes",
    "equal",
    "milliseconds",
    "copy_fraction",
    "off_ratio",
)
"""What may be measured; a result has None where it was not."""


def operations(shape: tuple[int, ...], chosen: argparse.Namespace) -> Iterator[Operation]:
    """Yields the operations that are asked for, on arrays of one shape."""
    for dtype, bits in itertools.product(chosen.dtypes, chosen.bits):
        yield from quantize.operations(shape, DTYPES[dtype], int(bits))
    yield from mask.operations(shape)
    for dtype in chosen.dtypes:
        yield from pool.operations(shape, DTYPES[dtype])


def usable(operation: Operation, platform: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yields those implementations that would not fall back, and says why the others would.

    Args:
        operation: What is to be measured.
        platform: JAX's name of the platform it is to run on.
        names: The implementations that are asked for.
    """
    for name in names:
        choices = implementations.select(operation.name, name, operation.case)
        (choice,) = (choice for choice in choices if choice.platform == platform)
        if choice.implementation == name:
            yield name
        else:
            announce_once(f"{operation.name} not with {name}: {choice.reason}")


@functools.cache
def announce_once(text: str) -> None:
    """Tells on stderr what concerns many results."""
    output.announce(text)


def result(
    operation: str, label: str, implementation: str, target: str, **figures: Any
) -> dict[str, Any]:
    """Returns a result: what was measured, followed by its figures."""
    return {
        "operation": operation,
        "label": label,
        "implementation": implementation,
        "target": target,
        "jax": jax.__version__,
        **dict.fromkeys(FIGURES),
        **figures,
    }


def heading(result: Mapping[str, Any]) -> str:
    """Returns what stands before the implementations of one operation."""
    return f"{result['operation']}\n[dim]{result['label']}[/dim]"
