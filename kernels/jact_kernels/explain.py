"""Which implementation each operation takes, and why, for people."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from jact_kernels.grouping import plan_groups
from jact_kernels.implementations import OPERATIONS, Choice, select
from jact_kernels.quantize.ranges import Scheme


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
      shape: the shape of the array; None leaves shapes out of account.
      dtype: its dtype, when it is quantised.
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
      quantize     cpu   xla  asked for by the argument
      quantize     cuda  xla  asked for by the argument
      ...
    """
    rows = []
    for operation, folder in OPERATIONS.items():
        case = None
        if shape is not None and folder == "mask":
            case = {"shape": shape}
        elif shape is not None:
            groups = plan_groups(shape, group_size)
            if groups is None:
                continue
            case = {"scheme": Scheme(groups=groups, bits=bits), "dtype": jnp.dtype(dtype)}
        rows += select(operation, implementation, case)
    return Explanation(tuple(rows))
