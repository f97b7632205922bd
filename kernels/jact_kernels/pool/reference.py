"""The pooling kernel in plain JAX, as each platform's compiler fuses it into one kernel."""

import functools
from collections.abc import Callable

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
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    even = all(x.shape[axis] % window == 0 for axis in axes)

    def first_scaled(x: jax.Array, add_up: Callable[..., jax.Array]) -> jax.Array:
        for axis in axes:
            x = x * _shares(x.shape, axis, window).astype(x.dtype)
        return add_up(x, window=window, axes=axes)

    def scaled_in_slices(x: jax.Array) -> jax.Array:
        # Hidden, as XLA takes a constant factor out of a sum, which then may overflow.
        share = lax.optimization_barrier(jnp.asarray(1 / window, x.dtype))

        def scale(part: jax.Array) -> jax.Array:
            for _ in axes:
                part = part * jnp.broadcast_to(share, part.shape)
            return part

        return sum_slices(x, window=window, axes=axes, scale=scale)

    # In every case, elements are scaled before they are added up, so that the sum of finite ones is
    # finite. XLA for CPUs would write the scaled array to memory if it were cut into slices later,
    # and reduces windows several times slower than it adds slices. A TPU keeps the last two axes in
    # tiles: to split one would turn the array around in memory.
    in_order = functools.partial(first_scaled, add_up=sum_slices)
    total = lax.platform_dependent(
        x,
        cpu=scaled_in_slices if even else in_order,
        tpu=functools.partial(first_scaled, add_up=sum_windows),
        default=in_order,
    )
    return total.astype(dtype)


def sum_slices(
    x: jax.Array,
    *,
    window: int,
    axes: tuple[int, ...],
    scale: Callable[[jax.Array], jax.Array] = lambda part: part,
) -> jax.Array:
    """The sum over each window, axis by axis and in order, of elements scaled by a function."""
    shape = pooled_shape(x.shape, window, axes)
    padding = [(0, shape[a] * window - n if a in axes else 0) for a, n in enumerate(x.shape)]
    x = jnp.pad(x, padding) if any(after for _, after in padding) else x
    for place, axis in enumerate(axes):
        split = (*x.shape[:axis], shape[axis], window, *x.shape[axis + 1 :])
        x = x.reshape(split)
        slices = [lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(window)]
        x = functools.reduce(jnp.add, slices if place else map(scale, slices))
    return x


def sum_windows(x: jax.Array, *, window: int, axes: tuple[int, ...]) -> jax.Array:
    """The sum over each window, in the compiler's order."""
    sizes = [window if axis in axes else 1 for axis in range(x.ndim)]
    padding = [(0, -n % size) for n, size in zip(x.shape, sizes, strict=True)]
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, sizes, sizes, padding)


@functools.partial(jax.jit, static_argnames=("shape", "window", "axes"))
def repeat_windows(
    pooled: jax.Array, *, shape: tuple[int, ...], window: int, axes: tuple[int, ...]
) -> jax.Array:
    """Repeats averages; see `jact_kernels.repeat_windows`."""
    spread = functools.partial(spread_windows, shape=shape, window=window, axes=axes)
    broadcast = functools.partial(broadcast_windows, shape=shape, window=window, axes=axes)
    # As for averages.
    return lax.platform_dependent(pooled, tpu=spread, default=broadcast)


def broadcast_windows(
    pooled: jax.Array, *, shape: tuple[int, ...], window: int, axes: tuple[int, ...]
) -> jax.Array:
    """Repeats averages along new axes, which are joined to the old ones."""
    split, places = _split(pooled.shape, window, axes)
    repeated = jnp.broadcast_to(lax.expand_dims(pooled, places), split)
    whole = tuple(n * window if axis in axes else n for axis, n in enumerate(pooled.shape))
    return lax.slice(repeated.reshape(whole), (0,) * len(shape), shape)


def spread_windows(
    pooled: jax.Array, *, shape: tuple[int, ...], window: int, axes: tuple[int, ...]
) -> jax.Array:
    """Spreads averages apart, and adds up windows that hold one of them each.

    A sum with zeros is exact but for subnormal numbers, which a TPU takes for zero in any case.
    """
    sizes = [window if axis in axes else 1 for axis in range(pooled.ndim)]
    padding = [
        (size - 1, length - (n - 1) * size - 1)
        for length, n, size in zip(shape, pooled.shape, sizes, strict=True)
    ]
    ones = (1,) * pooled.ndim
    zero = np.zeros((), pooled.dtype)
    return lax.reduce_window(pooled, zero, lax.add, sizes, ones, padding, base_dilation=sizes)


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
