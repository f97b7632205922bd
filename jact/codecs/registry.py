"""Codecs by name: presets for users, and kinds for JSON."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jact.codecs.average import Average
from jact.codecs.base import Codec
from jact.codecs.cast import Cast
from jact.codecs.keep import Keep
from jact.codecs.mask import Mask
from jact.codecs.offload import Offload
from jact.codecs.pool import Pool
from jact.codecs.pool_residual import PoolResidual
from jact.codecs.quantize import Quantize
from jact.spelling import must_be_one_of

PRESETS: Mapping[str, Codec] = MappingProxyType(
    {
        **{f"int{bits}": Quantize(bits=bits) for bits in (8, 6, 5, 4, 3, 2, 1)},
        "bf16": Cast(dtype="bfloat16"),
        "fp8": Cast(dtype="float8_e4m3fn"),
        "fp8_e5m2": Cast(dtype="float8_e5m2"),
        "pool2": Pool(window=2),
        "pool4": Pool(window=4),
        "pool2-int8": Pool(window=2, inner=Quantize(bits=8)),
        "pool2-int4": Pool(window=2, inner=Quantize(bits=4)),
        "hybrid2": PoolResidual(),
        "avg4-int2": Average(neighbours=4, bits=2),
        "offload": Offload(),
        "offload-int4": Offload(inner=Quantize(bits=4)),
        "keep": Keep(),
        "mask": Mask(),
    }
)
"""The codecs that have a name of their own."""

_KINDS: dict[str, type] = {}


def register(kind: str, cls: type) -> None:
    """Gives a class of codecs the name under which plans store it.

    Args:
      kind: the name; one class only can have it.
      cls: a frozen dataclass that follows the `Codec` protocol. Its fields are stored as JSON, so
        they hold numbers, strings, booleans, None, or further codecs.

    Raises:
      TypeError: `cls` is not a dataclass.
      ValueError: another class has that name.

    Example:
      >>> import dataclasses
      >>> from jact.codecs import Keep, register, to_json
      >>> @dataclasses.dataclass(frozen=True)
      ... class KeepLoudly(Keep):
      ...     volume: int = 11
      >>> register("keep_loudly", KeepLoudly)
      >>> to_json(KeepLoudly())
      {'kind': 'keep_loudly', 'volume': 11}
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"cls must be a dataclass, got {cls!r}")
    if _KINDS.setdefault(kind, cls) is not cls:
        raise ValueError(f"kind {kind!r} already names {_KINDS[kind].__name__}")


def resolve(codec: str | Codec) -> Codec:
    """Returns the codec that a preset names; a codec is returned as it is.

    Args:
      codec: a name in `PRESETS`, or a codec.

    Raises:
      ValueError: there is no such preset.
      TypeError: the argument is neither a string nor a codec.

    Example:
      >>> from jact.codecs import resolve
      >>> resolve("fp8")
      Cast(dtype='float8_e4m3fn')
    """
    if isinstance(codec, str):
        if codec not in PRESETS:
            raise ValueError(f"codec {must_be_one_of(codec, PRESETS)}")
        return PRESETS[codec]
    # A class has all the attributes that the protocol asks for, but it is not a codec.
    if isinstance(codec, type) or not isinstance(codec, Codec):
        lacks = _lacks(codec)
        raise TypeError(f"codec must be the name of a preset or a Codec, got {codec!r}{lacks}")
    return codec


def _lacks(codec: Any) -> str:
    """What is missing of something that is a codec in part, for a message."""
    members = [name for name in vars(Codec) if not name.startswith("_")]
    missing = [name for name in members if not hasattr(codec, name)]
    return f", which lacks {', '.join(missing)}" if 0 < len(missing) < len(members) else ""


def to_json(codec: Codec) -> dict[str, Any]:
    """Returns a codec as a dictionary of JSON values.

    Args:
      codec: an instance of a registered class.

    Raises:
      ValueError: the class is not registered.

    Example:
      >>> from jact.codecs import Cast, to_json
      >>> to_json(Cast())
      {'kind': 'cast', 'dtype': 'bfloat16'}
    """
    if not _is_registered(codec):
        raise ValueError(f"{type(codec).__name__} is not registered; known: {tuple(_KINDS)}")
    kind = next(kind for kind, cls in _KINDS.items() if cls is type(codec))
    fields = dataclasses.fields(_KINDS[kind])
    values = {field.name: getattr(codec, field.name) for field in fields}
    return {"kind": kind} | {
        name: to_json(value) if _is_registered(value) else value for name, value in values.items()
    }


def from_json(data: dict[str, Any]) -> Codec:
    """Undoes `to_json`.

    Args:
      data: a dictionary with a "kind" and that kind's fields; absent fields have their defaults.

    Raises:
      ValueError: the kind is not registered, or the fields are not its own.

    Example:
      >>> from jact.codecs import from_json
      >>> from_json({"kind": "quantize", "bits": 8}).name
      'int8'
    """
    values = dict(data)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {tuple(_KINDS)}, got {kind!r}")
    names = tuple(field.name for field in dataclasses.fields(_KINDS[kind]))
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"the fields of {kind!r} are {names}, got {unknown}")
    nested = {
        name: from_json(value) if isinstance(value, dict) and "kind" in value else value
        for name, value in values.items()
    }
    return _KINDS[kind](**nested)


def _is_registered(value: Any) -> bool:
    return type(value) in _KINDS.values()


register("quantize", Quantize)
register("mask", Mask)
register("cast", Cast)
register("keep", Keep)
register("pool", Pool)
register("pool_residual", PoolResidual)
register("average", Average)
register("offload", Offload)
