"""The mask's operations for benchmarks."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jact_kernels.bench import Operation
from jact_kernels.mask.api import mask_nbytes, pack_mask, unpack_mask


def operations(shape: tuple[int, ...]) -> Iterator[Operation]:
    """Packing a mask of this shape, and unpacking it.

    Example:
      >>> from jact_kernels.mask.bench import operations
      >>> [operation.least_bytes for operation in operations((2, 64))]
      [144, 144]
    """
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)
    packed = jax.eval_shape(pack_mask, mask)
    unpack = functools.partial(unpack_mask, shape=shape)
    for name, call, argument in (
        ("pack_mask", pack_mask, mask),
        ("unpack_mask", unpack, packed),
    ):
        yield Operation(
            name=name,
            label=f"bool {'x'.join(map(str, shape))}",
            call=call,
            arguments=(argument,),
            least_bytes=math.prod(shape) + mask_nbytes(shape),
            case={"shape": shape},
        )
