"""Which implementation each operation takes, and why, for people."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jact_kernels.grouping import plan_groups
from jact_kernels.implementations import OPERATIONS, Choice, select
from jact_kernels.quantize.ranges import Scheme

_Case = dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One row per operation and platform; printed, a table.

    Attributes:
      rows: the choices.
    """

    rows: tuple[Choice, ...]

    def __str__(self) -> str:
        cells = [(row.operation, row.platform, row.implementation, row.reason) for row in self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        return "\n".join(
            "  ".join((*map(str.ljust, row[:3], widths), row[3])).rstrip() for row in cells
        )


def explain(
    shape: tuple[int, ...] | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    bits: int = 4,
    group_size: int = 64,
    implementation: str | None = None,
) -> Explanation:
    """Says which implementation each operation takes on each platform, and why.

    Args:
      shape: the shape of the array; None leaves shapes out of account. Averages are taken to be
        over windows of two along all axes but the first and the last.
      dtype: its dtype, when it is quantised or averaged.
      bits: as for `quantize`.
      group_size: as for `quantize`.
      implementation: as for every operation: None for what the context or the environment say.

    Returns:
      The choices; `print` shows them as a table.

    Raises:
      ValueError: the implementation is unknown.

    Example:
      >>> import jact_kernels
      >>> print(jact_kernels.explain((16, 512, 768), implementation="xla"))  # doctest: +ELLIPSIS
      quantize        cpu   xla  asked for by the argument
      quantize        cuda  xla  asked for by the argument
      ...
    """
    rows = []
    for operation, folder in OPERATIONS.items():
        case = None
        if shape is not None:
            case = _CASES[folder](shape, jnp.dtype(dtype), bits, group_size)
            if case is None:
                continue
        rows += select(operation, implementation, case)
    return Explanation(tuple(rows))


def _quantize_case(shape: tuple[int, ...], dtype: jnp.dtype, bits: int, size: int) -> _Case:
    groups = plan_groups(shape, size)
    return groups and {"scheme": Scheme(groups=groups, bits=bits), "dtype": dtype}


def _mask_case(shape: tuple[int, ...], *_: object) -> _Case:
    return {"shape": shape}


def _pool_case(shape: tuple[int, ...], dtype: jnp.dtype, *_: object) -> _Case:
    axes = tuple(range(1, len(shape) - 1))
    return {"shape": shape, "dtypes": (dtype, dtype), "window": 2, "axes": axes} if axes else None


_CASES = {"quantize": _quantize_case, "mask": _mask_case, "pool": _pool_case}
"""What kernels are asked about an array, by folder; None where an operation takes none."""
