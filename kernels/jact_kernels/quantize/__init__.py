"""Floating-point arrays at 1 to 8 bits per element."""

from jact_kernels.quantize.api import (
    dequantize,
    group_ends,
    quantize,
    quantized_nbytes,
    rounding_variance,
)

__all__ = ["dequantize", "group_ends", "quantize", "quantized_nbytes", "rounding_variance"]
