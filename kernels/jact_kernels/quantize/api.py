"""Quantises arrays in groups that each have their own range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jact_kernels import implementations, packing
from jact_kernels.grouping import Groups, plan_groups
from jact_kernels.noise import Seed
from jact_kernels.quantize import reference
from jact_kernels.quantize.ranges import STORAGES, Scheme

BITS = range(1, 9)


def quantize(
    x: jax.Array,
    *,
    bits: int,
    group_size: int = 64,
    axis: int | None = None,
    seed: Seed = 0,
    stochastic: bool = True,
    zero_edge: bool = False,
    ranges: str = "bfloat16",
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
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

    With `zero_edge`, no code crosses zero: numbers above zero are decoded to numbers above zero,
    and numbers below to numbers below. Every range reaches to zero. In a group with both signs zero
    is halfway between two codes, and counts as negative; in a group of one sign zeros come back as
    zeros. The price is bias near zero, where an element can be rounded to one side alone: its error
    is still at most one step, and everywhere else the mean is exact. (At 1 bit there is nothing to
    draw in a group of both signs, and every element moves to one of two numbers.) After Chakrabarti
    and Moseley, "Backprop with Approximate Activations" (NeurIPS 2019), where the range is fixed
    and rounding is to the nearest.

    Args:
      x: a float16, bfloat16, float32 or float64 array with at least one axis and one element. It
        is computed with in float32; float64 magnitudes beyond float32's count as infinite.
      bits: 1 to 8 bits per element.
      group_size: about how many elements share a range.
      axis: along which axis a group lies, which may be the leading one; those that `plan_groups`
        chooses when None.
      seed: which stream of noise to round with; a Python integer or an integer scalar array.
      stochastic: whether to round at random, up or down, so that the mean is exact; otherwise to
        the nearest.
      zero_edge: whether signs are to survive.
      ranges: how ranges are stored. "bfloat16" takes 32 bits per group (24 with `zero_edge` below 8
        bits). "float32" takes 48, for groups far from zero and narrow, whose low end bfloat16 would
        round away: 1000 plus or minus 0.1 is stored as 996 to 1000.1 without it. "uint8" takes 16
        and a little, as the ranges of about 32 groups are stored relative to each other; where
        there are fewer than four groups besides the batch, it is "bfloat16".
      implementation: None, "auto", "xla", "pallas" or "triton"; see `use_implementation`.

    Returns:
      The codes, in the shape of `x` and of dtype uint8 or uint4 (those of 1 and 2 bits packed into
      uint8, as `pack_mask` does), followed by the arrays that store the ranges: by default the low
      end and the step of each group, bfloat16. Codes of 3, 5, 6 and 7 bits are split among such
      arrays, the highest bits first: five bits into uint4 and a packed mask.

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
    implementations.check_implementation(implementation)
    _check_float(x.dtype)
    scheme = _scheme(x.shape, bits, group_size, axis, stochastic, zero_edge, ranges)
    # An array even where it is static, so that different seeds share one trace.
    seed_array = np.uint32(seed % 2**32) if isinstance(seed, int) else seed

    def xla(x: jax.Array, seed: jax.Array) -> tuple[jax.Array, ...]:
        return reference.quantize(x, scheme=scheme, seed=seed)

    case = {"scheme": scheme, "dtype": x.dtype}
    choices = implementations.select("quantize", implementation, case)
    return implementations.run(choices, xla, x, seed_array, scheme=scheme)


def dequantize(
    *code: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    bits: int,
    group_size: int = 64,
    axis: int | None = None,
    zero_edge: bool = False,
    ranges: str = "bfloat16",
    implementation: str | None = None,
) -> jax.Array:
    """Decodes what `quantize` returned.

    Args:
      *code: the codes, and the arrays that store the ranges.
      shape: the shape of the array that was quantised.
      dtype: the floating-point dtype to return. What it cannot hold is cut to its finite range.
      bits: as given to `quantize`.
      group_size: as given to `quantize`.
      axis: as given to `quantize`.
      zero_edge: as given to `quantize`.
      ranges: as given to `quantize`.
      implementation: None, "auto", "xla", "pallas" or "triton"; see `use_implementation`.

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
    implementations.check_implementation(implementation)
    _check_float(dtype)
    scheme = _scheme(shape, bits, group_size, axis, True, zero_edge, ranges)
    expected = [entry.shape for entry in scheme.stored]
    if (given := [entry.shape for entry in code[len(scheme.planes) :]]) != expected:
        raise ValueError(
            f"an array of shape {shape} has ranges of shapes {expected} at group_size "
            f"{group_size}, got {given}"
        )
    case = {"scheme": scheme, "dtype": jnp.dtype(dtype)}
    choices = implementations.select("dequantize", implementation, case)
    xla = functools.partial(reference.dequantize, **case)
    return implementations.run(choices, xla, *code, **case)


def rounding_variance(
    x: jax.Array,
    *,
    bits: int,
    group_size: int = 64,
    axis: int | None = None,
    stochastic: bool = True,
    zero_edge: bool = False,
    ranges: str = "bfloat16",
    ends: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """The squared error that `quantize` is expected to make in each element.

    For stochastic rounding it is `step**2 * f * (1 - f)`, where f is the place of the element
    between two codes; for rounding to the nearest it is the square of the actual error. With
    `zero_edge` it is the expected squared error, bias included.

    Args:
      x: the array, as for `quantize`.
      bits: as for `quantize`.
      group_size: as for `quantize`.
      axis: as for `quantize`.
      stochastic: as for `quantize`.
      zero_edge: as for `quantize`.
      ranges: as for `quantize`.
      ends: what `group_ends` finds, where it is known: it is the same for all `bits`.

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
    scheme = _scheme(x.shape, bits, group_size, axis, stochastic, zero_edge, ranges)
    return reference.rounding_variance(x, scheme=scheme, known_ends=ends)


def group_ends(
    x: jax.Array, *, group_size: int = 64, axis: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest element of each group.

    Args:
      x: the array, as for `quantize`.
      group_size: as for `quantize`.
      axis: as for `quantize`.

    Returns:
      Two float32 arrays in the `grid_shape` of `plan_groups`. Where a group holds a NaN or an
      infinity one of its ends is no finite number.

    Raises:
      ValueError: the shape cannot be grouped.
      TypeError: the dtype of `x` is not a supported one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact_kernels import group_ends
      >>> low, high = group_ends(jnp.array([0.0, 0.25, 0.5, 1.0]))
      >>> low.tolist(), high.tolist()
      ([0.0], [1.0])
    """
    _check_float(x.dtype)
    groups = _groups(x.shape, group_size, axis)
    return reference.ends(x.reshape(groups.split_shape), groups)


def quantized_nbytes(
    shape: tuple[int, ...],
    *,
    bits: int,
    group_size: int = 64,
    axis: int | None = None,
    zero_edge: bool = False,
    ranges: str = "bfloat16",
) -> int:
    """The bytes that the codes and ranges of `quantize` take in a compiled program.

    XLA stores uint4 packed; `Array.nbytes` counts a whole byte for each.

    Args:
      shape: the shape of the array to be quantised.
      bits: as for `quantize`.
      group_size: as for `quantize`.
      axis: as for `quantize`.
      zero_edge: as for `quantize`.
      ranges: as for `quantize`.

    Raises:
      ValueError: `bits` is unknown, or the shape cannot be grouped.

    Example:
      >>> from jact_kernels import quantized_nbytes
      >>> quantized_nbytes((16, 512, 768), bits=4) / (16 * 512 * 768 * 4)
      0.140625
    """
    scheme = _scheme(shape, bits, group_size, axis, True, zero_edge, ranges)
    size = scheme.groups.count * scheme.groups.size
    planes = (
        -(-size * b // 8) if b in reference.CODE_DTYPES else packing.packed_nbytes(shape, b)
        for b in scheme.planes
    )
    return scheme.nbytes + sum(planes)


def _scheme(
    shape: tuple[int, ...],
    bits: int,
    group_size: int,
    axis: int | None,
    stochastic: bool,
    zero_edge: bool,
    ranges: str,
) -> Scheme:
    if bits not in BITS:
        raise ValueError(f"bits must be 1 to 8, got {bits}")
    if ranges not in STORAGES:
        raise ValueError(f"ranges must be one of {STORAGES}, got {ranges!r}")
    if zero_edge and ranges == "float32":
        raise ValueError('with zero_edge a low end needs no 32 bits, got ranges="float32"')
    groups = _groups(shape, group_size, axis)
    return Scheme(
        groups=groups, bits=bits, stochastic=stochastic, zero_edge=zero_edge, storage=ranges
    )


def _groups(shape: tuple[int, ...], group_size: int, axis: int | None) -> Groups:
    groups = plan_groups(shape, group_size, axis)
    if groups is None:
        along = "" if axis is None else f" along axis {axis}"
        raise ValueError(
            f"an array of shape {shape} cannot be divided into groups at group_size {group_size}"
            f"{along}; it takes at least one axis besides a batch and at least four elements in a "
            "group"
        )
    return groups


def _check_float(dtype: DTypeLike) -> None:
    if jnp.dtype(dtype).name not in reference.FLOATS:
        raise TypeError(f"dtype must be one of {reference.FLOATS}, got {jnp.dtype(dtype).name}")
