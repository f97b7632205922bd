"""Averages over windows, and their repetition."""

from jact_kernels.pool.api import average_pool, pooled_shape, repeat_windows

__all__ = ["average_pool", "pooled_shape", "repeat_windows"]
