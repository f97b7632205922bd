"""The quantiser's operations for benchmarks."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jact_kernels.bench import Operation
from jact_kernels.grouping import plan_groups
from jact_kernels.quantize.api import dequantize, quantize, quantized_nbytes
from jact_kernels.quantize.ranges import Scheme


def operations(shape: tuple[int, ...], dtype: str, bits: int) -> Iterator[Operation]:
    """Quantising an array of this shape and dtype, and decoding it.

    Example:
      >>> from jact_kernels.quantize.bench import operations
      >>> [operation.name for operation in operations((2, 64, 8), "float32", 4)]
      ['quantize', 'dequantize']
    """
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    encode = functools.partial(quantize, bits=bits)
    code = jax.eval_shape(encode, x)
    least = math.prod(shape) * x.dtype.itemsize + quantized_nbytes(shape, bits=bits)
    decode = functools.partial(dequantize, shape=shape, dtype=x.dtype, bits=bits)
    groups = plan_groups(shape)
    assert groups is not None
    case = {"scheme": Scheme(groups=groups, bits=bits), "dtype": x.dtype}
    for call, arguments in ((encode, (x,)), (decode, code)):
        yield Operation(
            name=call.func.__name__,
            label=f"{bits} bit, {x.dtype} {'x'.join(map(str, shape))}",
            call=call,
            arguments=tuple(arguments),
            least_bytes=least,
            case=case,
        )
