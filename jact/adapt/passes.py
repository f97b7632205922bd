"""The passes of a probe: a gradient, and the backward pass through the one that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.adapt import cotangents
from jact.adapt import layout as layouts
from jact.adapt.table import Layout
from jact.adapt.taps import BIAS, STORAGE, Taps, Turn
from jact.engine.compressed import pullback_of
from jact.engine.instrumented import instrumented_gradient
from jact.engine.origins import Input
from jact.engine.trace import Traced
from jact.policy import Policy


class Passes:
    """The passes of one traced function, with instruments in them."""

    def __init__(self, traced: Traced, residuals: layouts.Residuals, layout: Layout):
        self.layout = layout
        self.moving = traced.wanted
        self._traced = traced
        self._plan = residuals.stored_with(STORAGE)
        min_bytes = residuals.plan.basis.min_bytes
        self._storage = Policy(default=STORAGE, min_bytes=min_bytes, derivatives=False)

    def variances(self, key: Any, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """The gradient, flat, and the statistics of the variance along random signs."""
        gradients, pull = self._differentiate(Taps(self.layout), None, values)
        return gradients, pull(cotangents.signs(key, gradients, squared_norm(gradients)))

    def turn(
        self, turn: Turn, codec: int | None, key: Any, change: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """The gradient, flat, and the statistics of one turn.

        Args:
            turn: which one.
            codec: that of all turns, where there is one.
            key: of random signs, for the variance.
            change: of the gradient, for the bias.
            values: the function's.
        """
        # Else XLA would take out of the loop what all turns compute alike: decoded residuals.
        values, turn = compat.barrier((values, turn), ())[0]
        gradients, pull = self._differentiate(Taps(self.layout, codec), turn, values)
        squared = squared_norm(gradients)
        of_variance, of_change = turn.share == 0, turn.share == 1
        along = cotangents.either(
            of_variance,
            cotangents.signs(key, gradients, squared),
            cotangents.late(change, squared, turn.seed),
        )

        def nothing() -> Any:
            shape = (len(self.layout.names), len(self.layout.codecs) + BIAS)
            return compat.varying_like(jnp.zeros(shape, jnp.float32), values)

        return gradients, lax.cond(of_change, nothing, lambda: pull(along))

    def _differentiate(
        self, taps: Taps, turn: Turn | None, values: Sequence[Any]
    ) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """The gradient, and how statistics, `[residual, ...]`, follow from cotangents of it.

        The backward pass through the backward pass reads codes, too.
        """
        names = self.layout.names
        width = len(self.layout.codecs) + (0 if turn is None else BIAS)
        # Where the probe itself is mapped, each device measures its own gradient.
        row = compat.varying_like(jnp.zeros(width, jnp.float32), values)
        turns, tree = jax.tree.flatten(turn)

        def flat(*args: Any) -> list[Any]:
            rows, rest = args[: len(names)], args[len(names) :]
            operands = (
                dict(zip(names, rows, strict=True)),
                jax.tree.unflatten(tree, rest[: len(turns)]),
            )
            return instrumented_gradient(
                self._traced, self._plan, taps, operands, rest[len(turns) :]
            )[0]

        arrays = [*[row] * len(names), *turns, *values]
        closed: Any = jax.make_jaxpr(flat)(*arrays)
        inputs = [Input(f"constant[{i}]", wanted=False) for i in range(len(closed.consts))]
        inputs += [Input(name) for name in names]
        inputs += [Input(f"value[{i}]", wanted=False) for i in range(len(turns) + len(values))]
        gradients, pull = pullback_of(
            closed, [*closed.consts, *arrays], inputs, len(self.moving), self._storage
        )

        def rows_of(along: Sequence[Any]) -> Any:
            first = len(closed.consts)
            rows = pull(along)[first : first + len(names)]
            return jnp.stack(rows) if names else jnp.zeros((0, width), jnp.float32)

        return gradients, rows_of


def squared_norm(xs: Sequence[Any]) -> Any:
    """The squared norm of some arrays together, float32."""
    return sum((jnp.sum(jnp.square(jnp.abs(x)).astype(jnp.float32)) for x in xs), jnp.float32(0))
