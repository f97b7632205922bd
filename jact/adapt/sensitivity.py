"""Sensitivities: how far the gradient errs when one residual is stored by one codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from jact.adapt.table import Layout, Sensitivities
from jact.codecs import Codec
from jact.plan import PolicyLike


class Probe:
    """One instrumented forward and backward pass: value, gradient, and statistics of them.

    A probe is traceable: it works under `jit`, inside of `lax.scan` (over micro-batches, say) and
    under any sharding. It neither reads nor writes anything but its arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        codecs: Sequence[Codec | str],
        *,
        policy: PolicyLike = "int4",
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        samples: int = 1,
    ):
        """Takes a function to differentiate.

        Args:
            fun: as for `jact.value_and_grad`; or a `jact.transform.Compressed`.
            codecs: the candidates; `Keep()` comes to them if it is not among them.
            policy: chooses the residuals: a policy, or a plan, whose basis chooses.
            argnums: as for `jact.value_and_grad`.
            has_aux: as for `jact.value_and_grad`.
            samples: how many random directions the statistics are averaged over.
        """
        raise NotImplementedError

    def layout(self, *args: Any, **kwargs: Any) -> Layout:
        """The residuals at some arguments, arrays or types; nothing is run."""
        raise NotImplementedError

    def __call__(
        self, key: jax.Array, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """The value, the gradient, and the statistics.

        Args:
            key: a key for the random directions; may be traced.
            *args: the arguments of the function.
            **kwargs: its keyword arguments.

        Returns:
            The value, or the pair of value and auxiliary data; the gradient, in form that of
            `jact.value_and_grad`; and a flat dictionary of float32 arrays ("error" and "bias"
            `[residual, codec]`, "gradient" `[]`: means over what they were averaged over), for
            `Sensitivities.from_statistics`.
        """
        raise NotImplementedError


def sensitivity(
    fun: Callable[..., Any],
    codecs: Sequence[Codec | str] = ("int8", "int4", "int2"),
    *,
    policy: PolicyLike = "int4",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    method: Literal["local", "exact"] = "local",
    samples: int | None = None,
    seed: int = 0,
) -> Callable[..., Sensitivities]:
    """Tells how much the compression of each residual hurts the gradient.

    Args:
        fun: a function to differentiate.
        codecs: the candidates.
        policy: chooses the residuals.
        argnums: as in `jact.value_and_grad`.
        has_aux: as in `jact.value_and_grad`.
        method: "local" estimates all from one instrumented backward pass; "exact" runs the backward
            pass twice for each residual and codec.
        samples: how many random directions ("local") or pairs of draws of the rounding ("exact") to
            average over.
        seed: of all random numbers.

    Returns:
        A function with the arguments of `fun` that returns the table.
    """
    raise NotImplementedError
