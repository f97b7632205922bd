"""Codecs: how one array is stored between the forward and the backward pass."""

from jact.codecs.average import Average
from jact.codecs.base import Codec
from jact.codecs.cast import Cast
from jact.codecs.keep import Keep
from jact.codecs.mask import Mask
from jact.codecs.offload import Offload
from jact.codecs.pool import Pool
from jact.codecs.pool_residual import PoolResidual
from jact.codecs.quantize import Quantize
from jact.codecs.registry import PRESETS, from_json, register, resolve, to_json

__all__ = [
    "PRESETS",
    "Average",
    "Cast",
    "Codec",
    "Keep",
    "Mask",
    "Offload",
    "Pool",
    "PoolResidual",
    "Quantize",
    "from_json",
    "register",
    "resolve",
    "to_json",
]
