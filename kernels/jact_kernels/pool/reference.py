"""The pooling kernel in plain JAX: axes split in place and reduced, which XLA fuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike


def pooled_shape(shape: tuple[int, ...], window: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the averages."""
    return tuple(-(-n // window) if axis in axes else n for axis, n in enumerate(shape))


@functools.partial(jax.jit, static_argnames=("window", "axes", "dtype"))
def average_pool(
    x: jax.Array, *, window: int, axes: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
    """Averages `x`; see `jact_kernels.average_pool`."""
    shape = pooled_shape(x.shape, window, axes)
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    # Scaled before they are added up, so that the sum of finite elements is finite.
    for axis in axes:
        x = x * _shares(x.shape, axis, window).astype(x.dtype)
    padding = [(0, shape[a] * window - n if a in axes else 0) for a, n in enumerate(x.shape)]
    x = jnp.pad(x, padding) if any(after for _, after in padding) else x
    # Sums of slices, not reductions: XLA for CPUs runs those five times slower.
    for axis in axes:
        split = (*x.shape[:axis], shape[axis], window, *x.shape[axis + 1 :])
        x = x.reshape(split)
        slices = [lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(window)]
        x = functools.reduce(jnp.add, slices)
    return x.astype(dtype)


@functools.partial(jax.jit, static_argnames=("shape", "window", "axes"))
def repeat_windows(
    pooled: jax.Array, *, shape: tuple[int, ...], window: int, axes: tuple[int, ...]
) -> jax.Array:
    """Repeats averages; see `jact_kernels.repeat_windows`."""
    split, places = _split(pooled.shape, window, axes)
    repeated = jnp.broadcast_to(lax.expand_dims(pooled, places), split)
    whole = tuple(n * window if axis in axes else n for axis, n in enumerate(pooled.shape))
    return lax.slice(repeated.reshape(whole), (0,) * len(shape), shape)


def _split(
    pooled: tuple[int, ...], window: int, axes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape with pooled axes split into (windows, window), and the places of the latter."""
    split: list[int] = []
    places: list[int] = []
    for axis, n in enumerate(pooled):
        split.append(n)
        if axis in axes:
            places.append(len(split))
            split.append(window)
    return tuple(split), tuple(places)


def _shares(shape: tuple[int, ...], axis: int, window: int) -> np.ndarray:
    """What each entry of an axis has as its share in an average: less at the end if it is short."""
    n = shape[axis]
    counts = np.full(n, window)
    counts[n // window * window :] = n % window
    others = tuple(a for a in range(len(shape)) if a != axis)
    return np.expand_dims(1 / counts, others)
