"""What stores a value, and what of it stays exact all the same."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jact import codecs
from jact.codecs import Codec
from jact.policy import Action


def raw_bytes(aval: Any) -> int:
    """Bytes of an array of a type, as XLA stores it."""
    return codecs.Keep().nbytes(aval.shape, aval.dtype)


def storage(action: Action, aval: Any) -> tuple[Codec, str]:
    """The codec that an action asks for, or why the value stays exact all the same."""
    if isinstance(action, str):
        return codecs.Keep(), "the policy keeps it"
    if not action.supports(aval.shape, aval.dtype):
        return codecs.Keep(), f"{action.name} does not store such arrays"
    # In host memory an array as large as before is a gain for the device.
    offloaded = isinstance(action, codecs.Offload)
    if action.nbytes(aval.shape, aval.dtype) >= raw_bytes(aval) and not offloaded:
        return codecs.Keep(), f"{action.name} would not be smaller"
    return action, ""


def for_many_magnitudes(codec: Codec) -> Codec:
    """What stores `1 / x`: in a group's range, all but what is nearest to the pole would drown."""
    if isinstance(codec, codecs.Offload):
        return dataclasses.replace(codec, inner=for_many_magnitudes(codec.inner))
    of_equal_steps = codecs.Average | codecs.Pool | codecs.PoolResidual | codecs.Quantize
    return codecs.Cast() if isinstance(codec, of_equal_steps) else codec


def for_unlike_channels(codec: Codec, shape: tuple[int, ...]) -> Codec:
    """What stores values whose channels may lie far apart, as those before BatchNorm."""
    if isinstance(codec, codecs.Offload):
        return dataclasses.replace(codec, inner=for_unlike_channels(codec.inner, shape))
    return codec.for_unlike_channels(shape) if isinstance(codec, codecs.Quantize) else codec


def mask_if_it_pays(aval: Any) -> Codec:
    """How truth values are stored: packed, unless that takes more bytes."""
    mask = codecs.Mask()
    return mask if mask.nbytes(aval.shape, aval.dtype) < math.prod(aval.shape) else codecs.Keep()
