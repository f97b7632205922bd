"""The doors for modules: which of Flax's two libraries a thing to compress belongs to.

Each door is a module (`jact.doors.linen`, `jact.doors.nnx`) of these functions:

- `is_target(target)`: whether it compresses `target`, a class or an instance, by itself;
- `compress(target, policy, keep, methods)`: does so;
- `takes(args, kwargs)`: whether a call has modules among its arguments that need the door;
- `call(function, args, kwargs)`: calls a compressed function with such arguments;
- `prepare(function, args, kwargs, rewritten)`: analyses such a call;
- `method(function, owner)`: what a compressed function becomes as a method of the class `owner`,
  None for itself;
- `is_method(method)`: whether a bound method is one of a module's own.

A door whose modules are no pytrees to `jax.jit` also has `jit`, `map_arrays` and `functional`, and
one whose modules are pytrees to `jax.grad` has `not_differentiated`; see `jact.doors.nnx`.

A door is imported when its half of Flax has been: nothing else can be a module of it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def _doors() -> Iterator[Any]:
    for name in ("linen", "nnx"):
        if f"flax.{name}" in sys.modules:
            yield importlib.import_module(f"jact.doors.{name}")


def of_target(target: Any) -> Any | None:
    """The door that compresses a class or an instance; None for a function."""
    return next((door for door in _doors() if door.is_target(target)), None)


def of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The door that a call's arguments need; None where arrays are all that matters."""
    return next((door for door in _doors() if door.takes(args, kwargs)), None)


def not_differentiated(args: Sequence[Any]) -> str:
    """Why `jax.grad` does not take modules among some arguments; empty where it does."""
    door = of_call(tuple(args), {})
    tell = getattr(door, "not_differentiated", None)
    return "" if tell is None else tell(args)


def of_owner(owner: type) -> Any | None:
    """The door of the class that a compressed function is a method of."""
    return next((door for door in _doors() if door.is_target(owner)), None)


def unbound(fun: Any) -> Any | None:
    """The function behind a bound method of a module; None for anything else."""
    if inspect.ismethod(fun) and any(door.is_method(fun) for door in _doors()):
        return fun.__func__
    return None
