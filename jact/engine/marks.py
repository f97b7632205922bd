"""Marks on codes, by which a function around a compressed one recognises what that one saves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from jact import compat
from jact.engine.program import Equation

_PREFIX = "jact code "


@dataclasses.dataclass(frozen=True)
class Mark:
    """What one array of a code belongs to.

    Attributes:
        name: the name of the residual, under that of the loop that made it.
        in_loop: whether a loop's body made it, rather than a function that the user compressed.
        line: the user's line that made it.
        reason: why it was saved.
        exact: why it is stored exactly; empty when a codec stores it.
        codec: what stores it, as `jact.codecs.to_json` writes it.
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
    codec: dict[str, Any]
    shape: tuple[int, ...]
    dtype: str
    raw_bytes: int
    part: int = 0


def write(code: Any, mark: Mark) -> Any:
    """Marks the arrays of a code, from part `mark.part` on.

    Marks are `jax.ad_checkpoint.checkpoint_name` tags.
    """
    arrays, tree = jax.tree.flatten(code)
    for i, array in enumerate(arrays):
        text = json.dumps(dataclasses.asdict(dataclasses.replace(mark, part=mark.part + i)))
        arrays[i] = checkpoint_name(array, _PREFIX + text)
    return jax.tree.unflatten(tree, arrays)


def read(eqn: Equation) -> Mark | None:
    """The mark that an equation puts on its result."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith(_PREFIX):
        return None
    fields = json.loads(eqn.params["name"].removeprefix(_PREFIX))
    return Mark(**(fields | {"shape": tuple(fields["shape"])}))


def find(eqn: Equation, position: int) -> Mark | None:
    """The mark on a result of an equation, perhaps put inside of a loop or a call."""
    if (mark := read(eqn)) is not None:
        return mark
    for jaxpr in jex.jaxprs_in_params(eqn.params):
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        if len(inner.outvars) == len(eqn.outvars):
            mark = _find_inside(inner.eqns, inner.outvars[position])
            if mark is not None:
                return _repeated(mark, eqn, position, inner.outvars[position])
    return None


def _find_inside(eqns: Sequence[Equation], result: Any) -> Mark | None:
    for eqn in eqns:
        if compat.is_var(result) and result in eqn.outvars:
            return find(eqn, eqn.outvars.index(result))
    return None


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
