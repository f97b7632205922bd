"""Gradients in few numbers, so that differences of gradients can be told without keeping any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: Draws and columns of the sketch of a gradient. The square of its norm is that of the gradient's,
#: up to a relative error between `sqrt(2 / draws)`, 25 %, and `sqrt(2 / draws / columns)`, 9 %.
SKETCH = (32, 8)


def sketch(grads: Sequence[Any]) -> jax.Array:
    """Random sums of a gradient, float32 `[draws, columns]`.

    Each element takes part in one sum of each draw, with a random sign that is always the same. So
    a sketch is linear, and its squared norm is that of the gradient on average (Charikar, Chen and
    Farach-Colton, Finding Frequent Items in Data Streams, 2002).
    """
    draws, columns = SKETCH
    keys = jax.random.split(jax.random.key(0x6A616374), len(grads))
    bits = [jax.random.bits(k, g.shape, jnp.uint32) for k, g in zip(keys, grads, strict=True)]

    def sums(carry: None, shift: jax.Array) -> tuple[None, jax.Array]:
        total = jnp.zeros(columns)
        for grad, random in zip(grads, bits, strict=True):
            sign = 1.0 - 2.0 * ((random >> shift) & jnp.uint32(1)).astype(jnp.float32)
            moved = jnp.real(grad).astype(jnp.float32) * sign
            rows = jnp.atleast_1d(moved.sum(tuple(range(grad.ndim - 1))))
            folded = jnp.pad(rows, (0, -rows.size % columns)).reshape(-1, columns)
            total = total + folded.sum(0)
        return carry, total

    _, sketched = lax.scan(sums, None, jnp.arange(draws, dtype=jnp.uint32))
    return sketched / jnp.sqrt(jnp.float32(draws))


def spread(figures: Mapping[str, np.ndarray]) -> float | None:
    """The variance of a gradient over the batches of one probe; None where there was only one."""
    count = float(figures["count"])
    if count < 2:
        return None
    mean = figures["sketch"] / count
    return float((figures["sketch_squared"] / count - (mean**2).sum()) * count / (count - 1))
