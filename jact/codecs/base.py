"""What a codec is, and the sizes and dtypes that codecs share."""

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The floating-point dtypes of activations, by name."""


@runtime_checkable
class Codec(Protocol):
    """How one array is stored between the forward and the backward pass.

    A codec is a frozen, hashable object without arrays in it, so that it can be part of a plan. Its
    methods are traced: they work under `jit`, `vmap` and `scan`.
    """

    @property
    def name(self) -> str:
        """A short name for reports, such as "int4"."""
        ...

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether the codec can store an array of this shape and dtype at all."""
        ...

    def encode(self, x: jax.Array, seed: int | jax.Array) -> Any:
        """Stores an array.

        Args:
          x: an array that the codec supports.
          seed: the stream of noise, if the codec needs any: a Python integer (the identity of the
            residual) or a uint32 scalar array.

        Returns:
          The code, a pytree of arrays.
        """
        ...

    def decode(self, code: Any, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Returns an array of this shape and dtype, close to the one that was encoded."""
        ...

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of the code as a compiled program stores it."""
        ...

    def variance(self, x: jax.Array) -> jax.Array:
        """The expected squared error of each element, float32 in the shape of `x`."""
        ...


def is_float(dtype: DTypeLike) -> bool:
    """Whether a dtype is one of `FLOATS`; extended dtypes, such as those of keys, are not.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs.base import is_float
      >>> is_float(jnp.bfloat16), is_float(jnp.int32)
      (True, False)
    """
    return dtype_of(dtype).name in FLOATS


def dtype_of(dtype: DTypeLike) -> Any:
    """The dtype object of anything that names one; extended dtypes pass through."""
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype)


def materialized(x: jax.Array) -> jax.Array:
    """The array, kept in memory on a CPU before anything is made from it.

    XLA for CPUs would compute it anew in each of the loops that read it, and does not vectorise
    reductions of what it computes on the way. Elsewhere a barrier would only cost memory.
    """
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def array_nbytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """The bytes of an array as a compiled program stores it: 4-bit integers take half a byte.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs.base import array_nbytes
      >>> array_nbytes((3, 5), jnp.uint4), array_nbytes((3, 5), jnp.float32)
      (8, 60)
    """
    return -(-math.prod(shape) * _bits(dtype_of(dtype)) // 8)


def _bits(dtype: Any) -> int:
    # XLA packs these four only: it stores booleans and 1-bit integers in whole bytes.
    if dtype.name in ("int4", "uint4", "float4_e2m1fn"):
        return 4
    if dtype.name in ("int2", "uint2"):
        return 2
    return dtype.itemsize * 8
