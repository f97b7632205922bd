"""What a controller's arguments stand for, and what takes their place."""

from __future__ import annotations

from collections.abc import Sequence

from jact.codecs import Codec
from jact.plan import Plan, PolicyLike, resolve
from jact.policy import Policy


def candidates(codecs: Sequence[Codec | str] | None, bits: float | None) -> Sequence[Codec | str]:
    """The codecs to choose from: where some residuals are to gain, others have to lose bits."""
    if codecs is not None:
        return codecs
    widths = (6, 4, 3, 2, 1) if _is_low(bits) else (8, 6, 5, 4, 3, 2)
    return [f"int{width}" for width in widths]


def basis(policy: PolicyLike | None, bits: float | None) -> Policy:
    """The policy that chooses the residuals.

    Raises:
        ValueError: when `policy` leaves the function alone, or is a controller.
    """
    if policy is None:
        policy = "int2" if _is_low(bits) else "int4"
    resolved = resolve(policy)
    if isinstance(resolved, Plan):
        return resolved.basis
    if not isinstance(resolved, Policy):
        raise ValueError(f"policy must choose residuals, got {policy!r}")
    return resolved


def at_least(least: int, value: int, name: str) -> int:
    """The argument, if it is an integer of at least so much.

    Raises:
        TypeError: when it is none.
        ValueError: when it is less.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _is_low(bits: float | None) -> bool:
    """Whether so few bits on average ask for other residuals and other candidates."""
    return bits is not None and bits <= 2.5
