"""Array kernels that store activations in few bits: arrays in, arrays out."""

from jact_kernels.grouping import Groups, plan_groups
from jact_kernels.mask import mask_nbytes, pack_mask, unpack_mask
from jact_kernels.quantize import dequantize, quantize, quantized_nbytes, rounding_variance

__all__ = [
    "Groups",
    "dequantize",
    "mask_nbytes",
    "pack_mask",
    "plan_groups",
    "quantize",
    "quantized_nbytes",
    "rounding_variance",
    "unpack_mask",
]
