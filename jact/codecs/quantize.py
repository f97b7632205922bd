"""Quantisation at 1, 2, 4 or 8 bits per element."""

import dataclasses

import jax
from jax.typing import DTypeLike

import jact_kernels as kernels
from jact.codecs.base import is_float

BITS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """Stores floating-point arrays as small integers between the ends of each group's range.

    The code is (codes, low ends, steps). The codes keep the array's shape, so they shard as the
    array does; the ranges cost 32 bits per group. Method: Liu et al., "GACT" (ICML 2022), with the
    stored range rounded outwards before the codes are made, which keeps the result unbiased. See
    `jact_kernels.quantize`.

    Raises:
      ValueError: `bits` is not one of 1, 2, 4 and 8, or `group_size` is below four.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs import Quantize
      >>> codec = Quantize(bits=4)
      >>> x = jnp.linspace(0.0, 1.0, 4 * 64 * 2).reshape(4, 64, 2)
      >>> codec.nbytes(x.shape, x.dtype), x.nbytes
      (288, 2048)
      >>> y = codec.decode(codec.encode(x, seed=0), x.shape, x.dtype)
      >>> bool(abs(y - x).max() < 0.02)
      True
    """

    # Fewer bits, fewer bytes: an element's error doubles with each bit less, and more.
    bits: int = 4
    # About how many elements share a range. Smaller groups have narrower ranges, hence a smaller
    # error, at the price of 32 / group_size bits per element.
    group_size: int = 64
    # Rounding at random keeps gradients unbiased; to the nearest halves the greatest error.
    stochastic: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {self.bits!r}")
        if self.group_size < 4:
            raise ValueError(f"group_size must be at least 4, got {self.group_size}")

    @property
    def name(self) -> str:
        """The preset, with what differs from the default appended: "int4/32", "int4-nearest"."""
        group = "" if self.group_size == 64 else f"/{self.group_size}"
        return f"int{self.bits}{group}{'' if self.stochastic else '-nearest'}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array that divides into groups of four or more."""
        return is_float(dtype) and kernels.plan_groups(shape, self.group_size) is not None

    def encode(self, x: jax.Array, seed: int | jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the codes, and the low end and step of each group."""
        return kernels.quantize(
            x,
            bits=self.bits,
            group_size=self.group_size,
            seed=seed,
            stochastic=self.stochastic,
        )

    def decode(
        self,
        code: tuple[jax.Array, jax.Array, jax.Array],
        shape: tuple[int, ...],
        dtype: DTypeLike,
    ) -> jax.Array:
        """Returns the array, off by at most one step per element."""
        codes, low, step = code
        return kernels.dequantize(
            codes,
            low,
            step,
            shape=shape,
            dtype=dtype,
            bits=self.bits,
            group_size=self.group_size,
        )

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of codes and ranges; the dtype makes no difference."""
        del dtype
        return kernels.quantized_nbytes(shape, bits=self.bits, group_size=self.group_size)

    def variance(self, x: jax.Array) -> jax.Array:
        """The variance of stochastic rounding, or the squared error of rounding to the nearest."""
        return kernels.rounding_variance(
            x, bits=self.bits, group_size=self.group_size, stochastic=self.stochastic
        )
