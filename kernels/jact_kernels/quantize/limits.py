"""What several kernels leave to XLA, and why."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from jact_kernels.quantize.ranges import Scheme


def unsupported_scheme(scheme: Scheme) -> str | None:
    """Why no kernel takes these codes and ranges, or None if kernels do."""
    if len(scheme.planes) > 1:
        return "codes of 3, 5, 6 and 7 bits, which take several arrays, are left to XLA"
    if scheme.zero_edge or scheme.storage != "bfloat16":
        return "ranges with a zero edge, or stored otherwise than in bfloat16, are left to XLA"
    return None


def unsupported_packing(scheme: Scheme) -> str | None:
    """Why no kernel packs codes of one or two bits along an array's last axis, or None."""
    shape = scheme.groups.shape
    if scheme.bits < 4 and shape[-1] * scheme.bits % 8:
        return "one or two bits per element are packed along another axis than the last"
    return None


def unsupported_on_gpus(scheme: Scheme, dtype: DTypeLike) -> str | None:
    """Why no kernel for GPUs takes these arrays, or None if they may."""
    if jnp.dtype(dtype).name == "float64":
        return "float64 is left to XLA"
    if why := unsupported_scheme(scheme):
        return why
    if scheme.groups.last == len(scheme.groups.shape) - 1:
        return "groups along the last axis are left to XLA, which reduces them within a warp"
    return None
