"""Array kernels that store activations in few bits: arrays in, arrays out."""

from jact_kernels.explain import Explanation, explain
from jact_kernels.grouping import Groups, plan_groups
from jact_kernels.implementations import use_implementation
from jact_kernels.mask import mask_nbytes, pack_mask, unpack_mask
from jact_kernels.pool import average_pool, pooled_shape, repeat_windows
from jact_kernels.quantize import (
    dequantize,
    group_ends,
    quantize,
    quantized_nbytes,
    rounding_variance,
)

__all__ = [
    "Explanation",
    "Groups",
    "average_pool",
    "dequantize",
    "explain",
    "group_ends",
    "mask_nbytes",
    "pack_mask",
    "plan_groups",
    "pooled_shape",
    "quantize",
    "quantized_nbytes",
    "repeat_windows",
    "rounding_variance",
    "unpack_mask",
    "use_implementation",
]
