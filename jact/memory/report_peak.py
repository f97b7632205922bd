"""The peak of the gradient that a report is about, and what holds it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jact.compressed_function import Compressed
from jact.engine.compressed import uncompressed
from jact.engine.linearize import is_differentiable
from jact.memory.peak import analyze
from jact.memory.timeline import Timeline, analyze_over_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak temporary memory of one compiled gradient, as `jact.memory.peak` gives it.

    Attributes:
        plain_bytes: under plain JAX.
        bytes: with jact.
        host_bytes: with jact, in host memory; None for a CPU, which has no other.
        phase: the pass that jact's peak is in; empty where the compiler does not tell.
        forward_bytes: what the forward pass has made of what is live there: codes, masks and
            statistics, if the peak is in the backward pass.
        backward_bytes: what the backward pass has made of it, and needs for a moment alone.
        module: the module whose operations have made the most of the larger of these two.
    """

    plain_bytes: int
    bytes: int
    host_bytes: int | None = None
    phase: str = ""
    forward_bytes: int = 0
    backward_bytes: int = 0
    module: str = ""


def gradient_peak(function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Peak:
    """Compiles a function's gradient with jact and without, for JAX's default backend."""
    plain_function = copy.copy(function)
    plain_function.policy = None
    with uncompressed():
        plain = analyze(_gradient(plain_function), args, kwargs).temp_bytes
    ours, course = analyze_over_time("jact", _gradient(function), (args, kwargs))
    host = None if jax.default_backend() == "cpu" else ours.host_temp_bytes
    found = Peak(plain_bytes=plain, bytes=ours.temp_bytes, host_bytes=host)
    return found if course is None else _with_course(found, course)


def _with_course(found: Peak, course: Timeline) -> Peak:
    """A peak with what is in it."""
    early = [b for b in course.buffers if b.phase == "forward"]
    late = [b for b in course.buffers if b.phase == "backward"]
    sizes = [sum(buffer.bytes for buffer in part) for part in (early, late)]
    totals: Counter[str] = Counter()
    for buffer in early if sizes[0] > sizes[1] else late:
        totals[buffer.module] += buffer.bytes if buffer.module else 0
    return dataclasses.replace(
        found,
        phase=course.peak_phase,
        forward_bytes=sizes[0],
        backward_bytes=sizes[1],
        module=totals.most_common(1)[0][0] if totals else "",
    )


def _gradient(function: Compressed) -> Callable[..., Any]:
    """The value and gradient of a function of (args, kwargs), where only arrays come out."""
    # A part of a model has results of any shape, and we take them for their own cotangents.
    positions, has_aux = function._differentiated, function._has_aux

    def gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten_with_path((args, kwargs))
        chosen = {n % max(len(args), 1) for n in positions}
        moving = {
            i: leaf
            for i, (path, leaf) in enumerate(leaves)
            if _is_float(leaf) and (not positions or (path[0].idx == 0 and path[1].idx in chosen))
        }

        def at(moving: dict[int, Any]) -> tuple[list[Any], list[Any]]:
            values = [moving.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
            new_args, new_kwargs = jax.tree.unflatten(tree, values)
            out = function(*new_args, **new_kwargs)
            main = [x for x in jax.tree.leaves(out[0] if has_aux else out) if _is_float(x)]
            return main, [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

        main, pull, outputs = jax.vjp(at, moving, has_aux=True)
        return outputs, pull([jnp.ones_like(x) for x in main] if positions else main)

    return gradient


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and is_differentiable(leaf.dtype)
