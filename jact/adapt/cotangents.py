"""What the backward passes of a probe begin with.

There is a cotangent for each parameter, and they are all there from the beginning. XLA would
multiply each with what is saved of its layer at once, and keep the products until their turn comes.
Barriers don't prevent that: they keep XLA from sharing what is computed twice, but are gone before
it puts a program in order. So each cotangent is made to depend on what was computed before it is
needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jact.compat import shared_like
from jact.engine.backward import Late
from jact_kernels import compat
from jact_kernels.noise import random_bits


def signs(key: Any, like: Sequence[Any], root: Any) -> list[Late]:
    """Random signs; of complex numbers, of both parts. See `late`.

    Devices of a mapped region that share a parameter have its whole gradient each, but errors of
    their own part of the batch alone. So that squared errors sum up to as many times those of the
    gradient as there are gradients, signs are multiplied by the root of their number.
    """
    seeds = jax.random.bits(key, (max(len(like), 1), 2), jnp.uint32)

    def sign(shape: tuple[int, ...], seed: Any) -> Any:
        # A hash of a few instructions: jax.random's, one for each parameter, take longer to
        # compile than what is measured with them.
        return jnp.where(random_bits(shape, seed) >> jnp.uint32(31) == 0, 1.0, -1.0)

    def make(g: Any, seeds: Any, previous: Any) -> Any:
        seeds, number = shared_like(seeds, g)
        of_real, of_imaginary = seeds + _is_nan(previous, root)
        real = sign(g.shape, of_real).astype(jnp.float32)
        if jnp.issubdtype(g.dtype, jnp.complexfloating):
            real = lax.complex(real, sign(g.shape, of_imaginary).astype(jnp.float32))
        return (real * number**0.5).astype(g.dtype)

    return [Late(functools.partial(make, g, own)) for own, g in zip(seeds, like, strict=False)]


def late(arrays: Sequence[Any], root: Any, key: Any) -> list[Late]:
    """Arrays as cotangents, none of which can be used before what was computed last.

    What they are made to depend on is whether that is NaN, which no compiler knows beforehand.

    Args:
        arrays: the arrays.
        root: what the first one depends on.
        key: a number that differs between devices if what they measure does. Arrays that they share
            are multiplied by the number of devices; see `signs`.
    """

    def make(x: Any, previous: Any) -> Any:
        is_nan = _is_nan(previous, root)
        _, number = shared_like(key, x)
        return jnp.where(is_nan == 0, x * jnp.asarray(number, x.dtype), jnp.full_like(x, jnp.nan))

    return [Late(functools.partial(make, x)) for x in arrays]


def either(condition: Any, xs: Sequence[Late], ys: Sequence[Late]) -> list[Late]:
    """The first cotangents where a condition holds, and else the second ones."""

    def make(x: Late, y: Late, previous: Any) -> Any:
        return jnp.where(condition, x.make(previous), y.make(previous))

    return [Late(functools.partial(make, x, y)) for x, y in zip(xs, ys, strict=True)]


def _is_nan(previous: Any, root: Any) -> Any:
    """One if the first number of what was computed before, or else of the root, is NaN; or zero.

    Several devices look at all numbers, each at its own, and tell each other. Where a mapped region
    lets each device measure by itself they cannot, and it is zero.
    """
    x = root if previous is None else previous
    if not x.size or compat.is_varying(x):
        return jnp.uint32(0)
    return compat.by_devices(x, one=_first_is_nan, several=_any_is_nan)


def _first_is_nan(x: Any) -> Any:
    return jnp.isnan(x[(0,) * x.ndim]).astype(jnp.uint32)


def _any_is_nan(x: Any) -> Any:
    return jnp.isnan(x).any().astype(jnp.uint32)
