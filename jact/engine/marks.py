"""Marks on codes, by which a function around a compressed one recognises what that one saves."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from jact import compat
from jact.codecs import Codec
from jact.engine.program import Equation

_PREFIX = "jact code "

#: The name scopes, under a residual's name, of what encodes it and what decodes it. They tell in a
#: compiled program and in a profile which residual an operation is for.
ENCODE, DECODE = "jact.encode", "jact.decode"

#: The codecs that marks of this process name, each with its number. A mark is a text, in which the
#: codecs of users, which may be any objects, do not fit.
_numbers: dict[Codec, int] = {}
_codecs: list[Codec] = []
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Mark:
    """What one array of a code belongs to.

    Attributes:
        name: the name of the residual, under that of the loop that made it.
        in_loop: whether a loop's body made it, rather than a function that the user compressed.
        line: the user's line that made it.
        reason: why it was saved.
        exact: why it is stored exactly; empty when a codec stores it.
        codec: what stores it.
        shape: the residual's shape.
        dtype: the residual's dtype.
        raw_bytes: bytes of the residual itself, in all iterations of the loops around it.
        part: the position of the array in its code.
    """

    name: str
    in_loop: bool
    line: str
    reason: str
    exact: str
    codec: Codec
    shape: tuple[int, ...]
    dtype: str
    raw_bytes: int
    part: int = 0


def write(code: Any, marks: Sequence[Mark]) -> Any:
    """Marks the arrays of a code, from part `mark.part` on.

    Marks are `jax.ad_checkpoint.checkpoint_name` tags.

    Args:
        code: the arrays.
        marks: what they belong to. The branches of a `cond` share places, so that an array may
            belong to one residual or another.
    """
    arrays, tree = jax.tree.flatten(code)
    for i, array in enumerate(arrays):
        fields = [vars(m) | {"part": m.part + i, "codec": _number(m.codec)} for m in marks]
        arrays[i] = checkpoint_name(array, _PREFIX + json.dumps(fields))
    return jax.tree.unflatten(tree, arrays)


def _number(codec: Codec) -> int:
    with _lock:
        if codec not in _numbers:
            _codecs.append(codec)
            _numbers[codec] = len(_codecs) - 1
        return _numbers[codec]


def read(eqn: Equation) -> tuple[Mark, ...]:
    """The marks that an equation puts on its result; none if it does not."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith(_PREFIX):
        return ()
    marks = json.loads(eqn.params["name"].removeprefix(_PREFIX))
    return tuple(
        Mark(**(f | {"shape": tuple(f["shape"]), "codec": _codecs[f["codec"]]})) for f in marks
    )


def find(eqn: Equation, position: int) -> tuple[Mark, ...]:
    """The marks on a result of an equation, perhaps put inside of a loop, a branch or a call."""
    if found := read(eqn):
        return found
    marks: dict[str, Mark] = {}
    for jaxpr in jex.jaxprs_in_params(eqn.params):
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        if len(inner.outvars) == len(eqn.outvars):
            result = inner.outvars[position]
            for mark in _find_inside(inner.eqns, result):
                marks.setdefault(mark.name, _repeated(mark, eqn, position, result))
    return tuple(marks.values())


def _find_inside(eqns: Sequence[Equation], result: Any) -> tuple[Mark, ...]:
    for eqn in eqns:
        if compat.is_var(result) and result in eqn.outvars:
            return find(eqn, eqn.outvars.index(result))
    return ()


def _repeated(mark: Mark, eqn: Equation, position: int, result: Any) -> Mark:
    """The mark on what a loop stacks up of its iterations, or a mesh of its devices."""
    times = eqn.outvars[position].aval.size // max(result.aval.size, 1)
    if times == 1:
        return mark
    if eqn.primitive.name == "shard_map" and mark.shape:
        shape = (times * mark.shape[0], *mark.shape[1:])
    else:
        shape = (times, *mark.shape)
    return dataclasses.replace(mark, shape=shape, raw_bytes=times * mark.raw_bytes)
