"""Floating-point arrays in a shorter floating-point dtype."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact.codecs.base import array_nbytes, is_float

DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_SHORT_NAMES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """Stores floating-point arrays in a shorter dtype, rounded to the nearest.

    Finite values beyond the dtype's range become its greatest or least finite value. Infinities and
    NaN stay what they are, save that float8_e4m3fn has no infinity and stores NaN. Values too small
    for the dtype become zero: float8_e4m3fn ends at 2**-9, and nothing is scaled. Formats:
    Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433).

    Raises:
      ValueError: the dtype is not one of bfloat16, float8_e4m3fn and float8_e5m2.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs import Cast
      >>> codec = Cast(dtype="float8_e4m3fn")
      >>> x = jnp.array([0.3, -2.0, 1e6])
      >>> codec.decode(codec.encode(x, 0), x.shape, x.dtype).tolist()
      [0.3125, -2.0, 448.0]
    """

    #: The name of the dtype; a dtype object is accepted and replaced by its name.
    dtype: DTypeLike = "bfloat16"

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        if name not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {name!r}")
        object.__setattr__(self, "dtype", name)

    @property
    def name(self) -> str:
        """One of "bf16", "fp8" (float8_e4m3fn) and "fp8_e5m2"."""
        return _SHORT_NAMES[str(self.dtype)]

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether it is a floating-point array of 16 bits or more; any shape will do."""
        del shape
        return is_float(dtype)

    def encode(self, x: jax.Array, seed: int | jax.Array) -> jax.Array:
        """Returns the array in the shorter dtype; the seed makes no difference."""
        del seed
        return _saturating_cast(x, self.dtype)

    def decode(self, code: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns the array in its own dtype."""
        del shape
        # The greatest float16 is rounded up to a bfloat16 that float16 cannot hold.
        return _saturating_cast(code, dtype) if dtype == jnp.float16 else code.astype(dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """One or two bytes per element."""
        del dtype
        return array_nbytes(shape, self.dtype)

    def variance(self, x: jax.Array) -> jax.Array:
        """The squared error, as the rounding is not random."""
        y = self.decode(self.encode(x, 0), x.shape, jnp.float32)
        return jnp.square(y - x.astype(jnp.float32))


def _saturating_cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Converts an array; finite elements become finite ones."""
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    limit = jnp.asarray(float(jnp.finfo(dtype).max), wide.dtype)
    saturated = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -limit, limit), wide)
    return saturated.astype(dtype)


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)
