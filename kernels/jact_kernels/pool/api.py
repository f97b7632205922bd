"""Averages neighbours along some axes, and repeats the averages in their place."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact_kernels import implementations
from jact_kernels.pool import reference


def average_pool(
    x: jax.Array,
    *,
    window: int,
    axes: Sequence[int],
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Averages an array over windows of `window` entries along each of some axes.

    Windows lie side by side. Where `window` does not divide an axis, the last one is shorter, and
    its average is over what is there. Sums are formed in float32 of elements that were scaled down
    first, so that finite elements have a finite average.

    Sums are formed axis by axis and in order, except by XLA on a TPU, whose order is its own: an
    average of n elements there may be off by the rounding of n float32 additions.

    Args:
      x: a floating-point array.
      window: how many neighbours along each axis share an average, at least 1.
      axes: the axes, negative ones as in NumPy.
      dtype: the dtype of the averages; that of `x` when None.
      implementation: None, "auto", "xla", "pallas" or "triton"; see `use_implementation`.

    Returns:
      An array of shape `pooled_shape(x.shape, ...)`.

    Raises:
      ValueError: the window is not positive, the array has no such axes or one is named twice, or
        the implementation is unknown.
      TypeError: `x` is not a floating-point array.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import average_pool
      >>> average_pool(jnp.arange(10.0).reshape(2, 5), window=2, axes=(1,)).tolist()
      [[0.5, 2.5, 4.0], [5.5, 7.5, 9.0]]
    """
    implementations.check_implementation(implementation)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be a floating-point array, got dtype {x.dtype}")
    axes = _checked(x.shape, window, axes)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    static = {"window": window, "axes": axes}
    case = {"shape": x.shape, "dtypes": (x.dtype, dtype), **static}
    choices = implementations.select("average_pool", implementation, case)
    xla = functools.partial(reference.average_pool, dtype=dtype, **static)
    return implementations.run(choices, xla, x, dtype=dtype, **static)


def repeat_windows(
    pooled: jax.Array,
    *,
    shape: tuple[int, ...],
    window: int,
    axes: Sequence[int],
    implementation: str | None = None,
) -> jax.Array:
    """Repeats each average over its window.

    Args:
      pooled: what `average_pool` returned.
      shape: the shape of the array that was averaged.
      window: as given to `average_pool`.
      axes: as given to `average_pool`.
      implementation: None, "auto", "xla", "pallas" or "triton"; see `use_implementation`.

    Returns:
      An array of shape `shape` and of the dtype of `pooled`.

    Raises:
      ValueError: the shapes do not belong together, or as for `average_pool`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import repeat_windows
      >>> repeat_windows(jnp.array([1.0, 2.0]), shape=(3,), window=2, axes=(0,)).tolist()
      [1.0, 1.0, 2.0]
    """
    axes = _checked(shape, window, axes)
    static = {"shape": shape, "window": window, "axes": axes}
    case = {**static, "dtypes": (pooled.dtype, pooled.dtype)}
    choices = implementations.select("repeat_windows", implementation, case)
    if pooled.shape != (expected := reference.pooled_shape(shape, window, axes)):
        raise ValueError(
            f"an array of shape {shape} pools into {expected} by windows of {window} along axes "
            f"{axes}, got {pooled.shape}"
        )
    xla = functools.partial(reference.repeat_windows, **static)
    return implementations.run(choices, xla, pooled, **static)


def pooled_shape(shape: tuple[int, ...], *, window: int, axes: Sequence[int]) -> tuple[int, ...]:
    """The shape of the averages of an array of shape `shape`.

    Example:
      >>> from jact_kernels import pooled_shape
      >>> pooled_shape((128, 7, 7, 64), window=2, axes=(1, 2))
      (128, 4, 4, 64)
    """
    return reference.pooled_shape(shape, window, _checked(shape, window, axes))


def _checked(shape: tuple[int, ...], window: int, axes: Sequence[int]) -> tuple[int, ...]:
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not all(-len(shape) <= axis < len(shape) for axis in axes):
        raise ValueError(f"axes must be those of an array of shape {shape}, got {tuple(axes)}")
    positive = tuple(axis % len(shape) for axis in axes)
    if len(set(positive)) < len(positive):
        raise ValueError(f"axes must be different, got {tuple(axes)}")
    return tuple(sorted(positive))
