"""Quantises arrays in groups that each have their own range."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jact_kernels.grouping import Groups, plan_groups
from jact_kernels.implementations import check_implementation
from jact_kernels.mask import mask_nbytes
from jact_kernels.noise import Seed
from jact_kernels.quantize import reference

BITS = (1, 2, 4, 8)
RANGE_NBYTES = 4
"""Bytes per group: a bfloat16 low end and a bfloat16 step."""


def quantize(
    x: jax.Array,
    *,
    bits: int,
    group_size: int = 64,
    seed: Seed = 0,
    stochastic: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises an array in groups, each between its own least and greatest element.

    The range is rounded outwards to bfloat16 first, and the codes are made with the rounded range,
    so the mean over seeds of the decoded array is the array. Groups are those of `plan_groups`.
    Affine quantisation with stochastic rounding per group: Liu et al., "GACT" (ICML 2022), section
    3; there the codes are made with the exact range, which biases them.

    An element is off by at most one step when rounded stochastically and by half a step when
    rounded to the nearest. A step is the group's range over `2**bits - 1`, where the range starts
    at the bfloat16 number below the least element; a step is at least 2**-100. A constant group is
    decoded to its constant if bfloat16 holds it, and on average otherwise.

    A group with a NaN or an infinity decodes to NaN as a whole; no other group is touched. Finite
    groups decode to finite values, up to the limits of float32. At 1 bit a group whose range
    exceeds the greatest bfloat16 is cut to it from above.

    Args:
      x: a float16, bfloat16, float32 or float64 array with at least one axis and one element. It
        is computed with in float32; float64 magnitudes beyond float32's count as infinite.
      bits: 1, 2, 4 or 8 bits per element.
      group_size: about how many elements share a range.
      seed: which stream of noise to round with; a Python integer or an integer scalar array.
      stochastic: whether to round at random, up or down, so that the mean is exact; otherwise to
        the nearest.
      implementation: None or "auto" for the best one, or "xla".

    Returns:
      The codes, in the shape of `x` and of dtype uint8, uint4 or uint2 (for 1 bit, packed by
      `pack_mask`), and the low end and the step of each group, bfloat16.

    Raises:
      ValueError: `bits` or the implementation is unknown, or the shape cannot be grouped.
      TypeError: the dtype of `x` is not one of the above.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import dequantize, quantize
      >>> x = jnp.linspace(-1, 1, 2 * 64 * 3).reshape(2, 64, 3)
      >>> codes, low, step = quantize(x, bits=4, seed=7)
      >>> codes.shape, codes.dtype, low.shape
      ((2, 64, 3), dtype(uint4), (2, 1, 3))
      >>> y = dequantize(codes, low, step, shape=x.shape, dtype=x.dtype, bits=4)
      >>> bool(abs(y - x).max() <= step.max())
      True
    """
    check_implementation(implementation)
    _check_float(x.dtype)
    groups = _groups(x.shape, bits, group_size)
    # An array even where it is static, so that different seeds share one trace.
    seed_array = np.uint32(seed % 2**32) if isinstance(seed, int) else seed
    return reference.quantize(x, groups=groups, bits=bits, seed=seed_array, stochastic=stochastic)


def dequantize(
    codes: jax.Array,
    low: jax.Array,
    step: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int = 64,
    implementation: str | None = None,
) -> jax.Array:
    """Decodes what `quantize` returned.

    Args:
      codes: the codes.
      low: the low end of each group, bfloat16.
      step: the step of each group, bfloat16.
      shape: the shape of the array that was quantised.
      dtype: the floating-point dtype to return. What it cannot hold is cut to its finite range.
      bits: as given to `quantize`.
      group_size: as given to `quantize`.
      implementation: None or "auto" for the best one, or "xla".

    Returns:
      An array of shape `shape` and dtype `dtype`.

    Raises:
      ValueError: `bits` or the implementation is unknown, or the shapes do not belong together.
      TypeError: `dtype` is not a supported floating-point dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import dequantize, quantize
      >>> x = jnp.arange(16.0)
      >>> code = quantize(x, bits=4, stochastic=False)
      >>> dequantize(*code, shape=(16,), dtype=jnp.bfloat16, bits=4)[:3].tolist()
      [0.0, 1.0, 2.0]
    """
    check_implementation(implementation)
    _check_float(dtype)
    groups = _groups(shape, bits, group_size)
    if low.shape != groups.grid_shape or step.shape != groups.grid_shape:
        raise ValueError(
            f"an array of shape {shape} has ranges of shape {groups.grid_shape} at group_size "
            f"{group_size}, got {low.shape} and {step.shape}"
        )
    return reference.dequantize(codes, low, step, groups=groups, bits=bits, dtype=jnp.dtype(dtype))


def rounding_variance(
    x: jax.Array, *, bits: int, group_size: int = 64, stochastic: bool = True
) -> jax.Array:
    """The squared error that `quantize` is expected to make in each element.

    For stochastic rounding it is `step**2 * f * (1 - f)`, where f is the place of the element
    between two codes; for rounding to the nearest it is the square of the actual error.

    Args:
      x: the array, as for `quantize`.
      bits: as for `quantize`.
      group_size: as for `quantize`.
      stochastic: as for `quantize`.

    Returns:
      A float32 array of the shape of `x`; NaN in groups with a NaN or an infinity.

    Raises:
      ValueError: `bits` is unknown, or the shape cannot be grouped.
      TypeError: the dtype of `x` is not a supported one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import rounding_variance
      >>> rounding_variance(jnp.array([0.0, 0.25, 0.5, 1.0]), bits=1).tolist()
      [0.0, 0.1875, 0.25, 0.0]
    """
    _check_float(x.dtype)
    groups = _groups(x.shape, bits, group_size)
    return reference.rounding_variance(x, groups=groups, bits=bits, stochastic=stochastic)


def quantized_nbytes(shape: tuple[int, ...], *, bits: int, group_size: int = 64) -> int:
    """The bytes that the codes and ranges of `quantize` take in a compiled program.

    XLA stores uint4 and uint2 packed; `Array.nbytes` counts a whole byte for each.

    Args:
      shape: the shape of the array to be quantised.
      bits: as for `quantize`.
      group_size: as for `quantize`.

    Raises:
      ValueError: `bits` is unknown, or the shape cannot be grouped.

    Example:
      >>> from jact_kernels import quantized_nbytes
      >>> quantized_nbytes((16, 512, 768), bits=4) / (16 * 512 * 768 * 4)
      0.140625
    """
    groups = _groups(shape, bits, group_size)
    packed = -(-groups.count * groups.size * bits // 8)
    codes = mask_nbytes(shape) if bits == 1 else packed
    return codes + groups.count * RANGE_NBYTES


def _groups(shape: tuple[int, ...], bits: int, group_size: int) -> Groups:
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {bits}")
    groups = plan_groups(shape, group_size)
    if groups is None:
        raise ValueError(
            f"an array of shape {shape} cannot be divided into groups at group_size {group_size}; "
            "it takes at least one axis besides a batch and at least four elements in a group"
        )
    return groups


def _check_float(dtype: DTypeLike) -> None:
    if jnp.dtype(dtype).name not in reference.FLOATS:
        raise TypeError(f"dtype must be one of {reference.FLOATS}, got {jnp.dtype(dtype).name}")
