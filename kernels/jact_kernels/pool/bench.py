"""The pool's operations for benchmarks."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jact_kernels.bench import Operation
from jact_kernels.pool.api import average_pool, repeat_windows

WINDOW = 2


def operations(shape: tuple[int, ...], dtype: str) -> Iterator[Operation]:
    """Averaging over windows of two along all axes but the batch and the channels, and repeating.

    Example:
      >>> from jact_kernels.pool.bench import operations
      >>> [operation.least_bytes for operation in operations((2, 4, 4, 8), "float32")]
      [1280, 1280]
    """
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    static = {"window": WINDOW, "axes": tuple(range(1, len(shape) - 1))}
    average = functools.partial(average_pool, **static)
    pooled = jax.eval_shape(average, x)
    repeat = functools.partial(repeat_windows, shape=shape, **static)
    for call, argument in ((average, x), (repeat, pooled)):
        yield Operation(
            name=call.func.__name__,
            label=f"{WINDOW} wide, {x.dtype} {'x'.join(map(str, shape))}",
            call=call,
            arguments=(argument,),
            least_bytes=(math.prod(shape) + math.prod(pooled.shape)) * x.dtype.itemsize,
            case={"shape": shape, "dtypes": (x.dtype, x.dtype), **static},
            exact=call is not average,
        )
