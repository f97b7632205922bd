"""What a benchmark needs to know of an operation: how to call it, and the bytes it cannot avoid."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation at one size.

    Attributes:
      name: the name of the function, such as "quantize".
      label: what else tells it from others, such as "4 bit, float32 8x512x768".
      call: the function, of its arrays and the keyword argument `implementation`.
      arguments: the types of the arrays.
      least_bytes: the bytes of what it must read and write once.
      case: what a kernel's `unsupported` is asked about.
      exact: whether every compiler gives the same bits; if not, sums are rounded as each orders
        them.
    """

    name: str
    label: str
    call: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    least_bytes: int
    case: Mapping[str, Any]
    exact: bool = True
