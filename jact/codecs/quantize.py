"""Quantisation at 1 to 8 bits per element."""

import dataclasses
from typing import Any, Self

import jax
from jax.typing import DTypeLike

import jact_kernels as kernels
from jact.codecs.base import is_float

BITS = range(1, 9)
_RANGE_NAMES = {"bfloat16": "", "float32": "-f32", "uint8": "-u8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """Stores floating-point arrays as small integers between the ends of each group's range.

    The code is the codes, followed by the ranges: by default low ends and steps. The codes keep the
    array's axes, so they shard as the array does; the ranges cost 32 bits per group. Method: Liu et
    al., "GACT" (ICML 2022), with the stored range rounded outwards before the codes are made, which
    keeps the result unbiased. See `jact_kernels.quantize`.

    Raises:
      ValueError: `bits` is not 1 to 8, `group_size` is below four, or `ranges` is
        unknown, or "float32" with `zero_edge`.

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

    #: Fewer bits take fewer bytes; an element's error doubles with each bit less, and more. 1, 2, 4
    #: and 8 take one array; 3, 5, 6 and 7 are split among several, which takes longer.
    bits: int = 4
    #: About how many elements share a range. Smaller groups have narrower ranges, hence a smaller
    #: error, at the price of 32 / group_size bits per element.
    group_size: int = 64
    #: Rounding at random keeps gradients unbiased; to the nearest halves the greatest error.
    stochastic: bool = True
    #: Along which axis groups lie; None chooses among those between the batch and the channels. A
    #: negative one means the same under `vmap`. Only on request do groups cross the batch.
    axis: int | None = None
    #: Whether the signs of all elements survive, after Chakrabarti and Moseley, "Backprop with
    #: Approximate Activations" (NeurIPS 2019): no code crosses zero, and zero itself counts as
    #: negative in groups with both signs. The price is bias near zero.
    zero_edge: bool = False
    #: How ranges are stored. "bfloat16" takes 32 bits per group, "float32" 48 (for narrow groups
    #: far from zero), "uint8" 16 and a little, as ranges are stored relative to those around.
    ranges: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be 1 to 8, got {self.bits!r}")
        if self.group_size < 4:
            raise ValueError(f"group_size must be at least 4, got {self.group_size}")
        if self.ranges not in _RANGE_NAMES:
            raise ValueError(f"ranges must be one of {tuple(_RANGE_NAMES)}, got {self.ranges!r}")
        if self.zero_edge and self.ranges == "float32":
            raise ValueError('with zero_edge a low end needs no 32 bits, got ranges="float32"')

    @property
    def name(self) -> str:
        """The preset, with what differs from the default appended: "int4/32", "int4-nearest"."""
        group = "" if self.group_size == 64 else f"/{self.group_size}"
        axis = "" if self.axis is None else f"@{self.axis}"
        rounding = "" if self.stochastic else "-nearest"
        edge = "-edge" if self.zero_edge else ""
        return f"int{self.bits}{group}{axis}{rounding}{edge}{_RANGE_NAMES[self.ranges]}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array that divides into groups of four or more."""
        return (
            is_float(dtype) and kernels.plan_groups(shape, self.group_size, self.axis) is not None
        )

    def encode(self, x: jax.Array, seed: int | jax.Array) -> tuple[jax.Array, ...]:
        """Returns the codes, and the arrays that store the range of each group."""
        return kernels.quantize(
            x, bits=self.bits, seed=seed, stochastic=self.stochastic, **self._layout
        )

    def decode(
        self, code: tuple[jax.Array, ...], shape: tuple[int, ...], dtype: DTypeLike
    ) -> jax.Array:
        """Returns the array, off by at most one step per element."""
        return kernels.dequantize(*code, shape=shape, dtype=dtype, bits=self.bits, **self._layout)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of codes and ranges; the dtype makes no difference."""
        del dtype
        return kernels.quantized_nbytes(shape, bits=self.bits, **self._layout)

    def variance(self, x: jax.Array, ends: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
        """The expected squared error: with `zero_edge` or to the nearest, bias included.

        Args:
          x: the array.
          ends: what `ends` finds of it, where that is known.
        """
        return kernels.rounding_variance(
            x, bits=self.bits, stochastic=self.stochastic, ends=ends, **self._layout
        )

    def ends(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The least and greatest element of each group; codecs of the same groups find the same."""
        return kernels.group_ends(x, group_size=self.group_size, axis=self.axis)

    def for_unlike_channels(self, shape: tuple[int, ...]) -> Self:
        """The codec for values whose channels may lie far apart, as those before BatchNorm.

        Where groups lie along the channels (there are too few elements between the batch and them,
        as in maps of 1 x 1), such channels share a range, and are stored to within a part of their
        distance, which can be more than a channel varies. So there are 8 bits for each, at least.
        Groups along the batch would do, too, but not on several devices that share it.

        Args:
          shape: the values' shape, the batch first and the channels last.

        Example:
          >>> from jact.codecs import Quantize
          >>> Quantize(bits=4).for_unlike_channels((128, 1, 1, 512)).name
          'int8'
          >>> Quantize(bits=4).for_unlike_channels((128, 7, 7, 512)).name
          'int4'
        """
        groups = kernels.plan_groups(shape, self.group_size, self.axis)
        if groups is None or groups.last < len(shape) - 1:
            return self
        return dataclasses.replace(self, bits=max(self.bits, 8))

    @property
    def _layout(self) -> dict[str, Any]:
        fields = ("group_size", "axis", "zero_edge", "ranges")
        return {field: getattr(self, field) for field in fields}
