"""Booleans at one bit each."""

from jact_kernels.mask.api import mask_nbytes, pack_mask, unpack_mask

__all__ = ["mask_nbytes", "pack_mask", "unpack_mask"]
