"""Averages over windows of neighbours."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jact_kernels as kernels
from jact.codecs.base import Codec, array_nbytes, is_float, materialized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Stores the average of each window of neighbours, and repeats it in their place.

    Windows lie side by side; at an odd end they are shorter. Averages have the array's dtype, or
    are stored by another codec in turn. Method: Barley and Fröning, "Less Memory Means Smaller
    GPUs" (arXiv 2409.11902).

    The result is biased: what varies within a window is lost. It suits images whose neighbours are
    alike, and what enters the gradient as an average over them.

    Raises:
      ValueError: `window` is below two, or `axes` names none or one of them twice.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs import Pool
      >>> codec = Pool(window=2)
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> codec.nbytes(x.shape, x.dtype), x.nbytes
      (16, 64)
      >>> codec.decode(codec.encode(x, 0), x.shape, x.dtype)[0, :, :, 0].tolist()[0]
      [2.5, 2.5, 4.5, 4.5]
    """

    #: How many neighbours along each axis share an average; bytes fall by its power.
    window: int = 2
    #: The axes to average along. None stands for all but the first (the batch) and the last (the
    #: channels), which suits NHWC and sequences; arrays of fewer than three axes have none. For
    #: NCHW say (-2, -1).
    axes: tuple[int, ...] | None = None
    #: How the averages are stored; as they are when None.
    inner: Codec | None = None

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"window must be at least 2, got {self.window}")
        if self.axes is not None:
            # JSON has lists only.
            object.__setattr__(self, "axes", checked_axes(self.axes))

    @property
    def name(self) -> str:
        """Such as "pool2", with other axes and the inner codec appended: "pool2@-2,-1-int8"."""
        axes = "" if self.axes is None else f"@{','.join(map(str, self.axes))}"
        inner = "" if self.inner is None else f"-{self.inner.name}"
        return f"pool{self.window}{axes}{inner}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array with those axes, whose averages can be stored."""
        axes = spatial_axes(shape, self.axes)
        if not is_float(dtype) or axes is None or 0 in shape:
            return False
        return self.inner is None or self.inner.supports(self._pooled_shape(shape), dtype)

    def encode(self, x: jax.Array, seed: int | jax.Array) -> Any:
        """Returns the averages, or their code."""
        pooled = kernels.average_pool(x, window=self.window, axes=self._axes(x.shape))
        return pooled if self.inner is None else self.inner.encode(materialized(pooled), seed)

    def decode(self, code: Any, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the averages, each repeated over its window."""
        pooled = (
            code
            if self.inner is None
            else materialized(self.inner.decode(code, self._pooled_shape(shape), dtype))
        )
        return kernels.repeat_windows(
            pooled, shape=shape, window=self.window, axes=self._axes(shape)
        )

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of the averages, or of their code."""
        pooled = self._pooled_shape(shape)
        return (
            array_nbytes(pooled, dtype) if self.inner is None else self.inner.nbytes(pooled, dtype)
        )

    def variance(self, x: jax.Array) -> jax.Array:
        """The squared distance to the average, plus the error of the average's own code.

        That is the expected squared error, bias included: of each element without an inner codec,
        and of each window's sum with one, as deviations from an average add up to nothing.
        """
        axes = self._axes(x.shape)
        pooled = kernels.average_pool(x, window=self.window, axes=axes)

        def repeat(averages: jax.Array) -> jax.Array:
            return kernels.repeat_windows(averages, shape=x.shape, window=self.window, axes=axes)

        distance = repeat(pooled).astype(jnp.float32) - x.astype(jnp.float32)
        inner = 0 if self.inner is None else repeat(self.inner.variance(pooled))
        return jnp.square(distance) + inner

    def _axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = spatial_axes(shape, self.axes)
        if axes is None:
            raise ValueError(f"{self.name} does not store arrays of shape {shape}")
        return axes

    def _pooled_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return kernels.pooled_shape(shape, window=self.window, axes=self._axes(shape))


def spatial_axes(shape: tuple[int, ...], axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The axes to average along: those given, or all between the batch and the channels.

    Returns:
      The axes, or None if the array does not have them.
    """
    ndim = len(shape)
    if axes is None:
        return tuple(range(1, ndim - 1)) or None
    return axes if all(-ndim <= axis < ndim for axis in axes) and distinct(axes, ndim) else None


def distinct(axes: Sequence[int], ndim: int) -> bool:
    """Whether no two of the axes are the same one."""
    return len({axis % ndim for axis in axes}) == len(axes)


def checked_axes(axes: Sequence[int]) -> tuple[int, ...]:
    """Axes as a tuple of integers."""
    axes = tuple(axes)
    if not axes or len(set(axes)) < len(axes) or not all(isinstance(a, int) for a in axes):
        raise ValueError(f"axes must be different integers, got {axes}")
    return axes
