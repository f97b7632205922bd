"""Name scopes for the modules of Flax, so that residuals are called after the layer that made them.

Linen runs every method of a module under `jax.named_scope`: the class name for the module that was
applied, the submodule's name (`Block_0`, or `blocks_0` for a member of a list) below it, with
`.method` appended for methods other than `__call__`. It does so unless `flax_profile` is off. NNX
writes nothing on the name stack. `module_scopes` supplies both.

NNX modules share no code on the way into `__call__`, which Python looks up on the class, so there
is nothing to hook but the classes themselves. While at least one trace asks for scopes, the
`__call__` of each subclass of `nnx.Module` is replaced by one that opens the scope and calls the
original; when the last such trace ends, the classes are as they were. Other threads meet the
replacements, too, but these open a scope only where a context variable says that jact is tracing.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

# The modules that are being called, outermost first; None where jact is not tracing.
_callers: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "jact_callers", default=None
)

# JAX keeps the traces of nested `jax.jit` functions. Those with our scopes must be kept apart from
# those without: a name must not depend on what was traced before, nor scopes leak out of jact.
_under_scopes = jax.make_user_context(False)


@contextlib.contextmanager
def module_scopes() -> Iterator[None]:
    """Names what Flax modules compute after the modules, while the context lasts.

    Calling an NNX module enters the name scope of its attribute in the module that called it
    (`conv1`; `blocks_3` for the fourth member of a list, tuple or `nnx.List`; `heads_a` for an
    entry of a dictionary), or of its class if no module called it, or the caller does not hold it.
    So it is with the copies that NNX's transformations (`nnx.jit`, `nnx.remat`, `nnx.scan`) make.

    Nothing happens unless Flax was imported. Contexts may be nested, where each starts from a root
    of its own, and may be active in several threads.

    Yields:
        Nothing.
    """
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    with contextlib.ExitStack() as stack:
        if nnx is not None or linen is not None:
            stack.enter_context(_under_scopes(True))
        if linen is not None:
            stack.enter_context(linen.override_named_call(True))
        if nnx is not None:
            stack.enter_context(_calls.replaced(nnx.Module))
            stack.callback(_callers.reset, _callers.set(()))
        yield


class _Calls:
    """The replaced `__call__` methods, and how many contexts need them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        # For each class, the method that was put there and the one that it had, if it had one.
        self._replaced: dict[type, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def replaced(self, base: type) -> Iterator[None]:
        """Replaces the method of all present subclasses of `base` that lack a replacement."""
        with self._lock:
            self._users += 1
        try:
            with self._lock:
                for cls in _subclasses(base):
                    self._replace(cls, base)
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _replace(self, cls: type, base: type) -> None:
        if cls in self._replaced:
            return
        owner = next((c for c in cls.__mro__ if "__call__" in vars(c)), None)
        # A method inherited from a module is replaced there; one from a mixin, in the module.
        if owner is None or (owner is not cls and issubclass(owner, base)):
            return
        replacement = in_scope(vars(owner)["__call__"])
        self._replaced[cls] = replacement, vars(cls).get("__call__")
        cls.__call__ = replacement  # pyright: ignore[reportAttributeAccessIssue]

    def _restore(self) -> None:
        for cls, (replacement, original) in self._replaced.items():
            # Whoever has replaced the method since then holds on to ours, which does nothing now.
            if vars(cls).get("__call__") is not replacement:
                continue
            if original is None:
                del cls.__call__  # pyright: ignore[reportAttributeAccessIssue]
            else:
                cls.__call__ = original  # pyright: ignore[reportAttributeAccessIssue]
        self._replaced.clear()


_calls = _Calls()


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in type.__subclasses__(cls):
        yield subclass
        yield from _subclasses(subclass)


def in_scope(method: Any) -> Callable[..., Any]:
    """A `__call__` that runs `method` in the scope of its module, while jact is tracing."""

    @functools.wraps(method)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # The method may be any descriptor: `nnx.jit` and `nnx.remat` decorate methods, too.
        call = method.__get__(self, type(self)) if hasattr(method, "__get__") else method
        callers = _callers.get()
        # `super().__call__(...)` stays in the scope of the method that it is called from.
        if callers is None or (callers and callers[-1] is self):
            return call(*args, **kwargs)
        token = _callers.set((*callers, self))
        try:
            with jax.named_scope(_scope(callers, self)):
                return call(*args, **kwargs)
        finally:
            _callers.reset(token)

    return __call__


def _scope(callers: Sequence[Any], module: Any) -> str:
    """The path of a module within the innermost of its callers that holds it."""
    for caller in reversed(callers):
        path = _path(caller, module)
        if path is not None:
            return path
    return _legal(type(module).__name__)


def _path(holder: Any, module: Any) -> str | None:
    """The shortest path of attributes and keys that leads from one module to another."""
    # The module is nearly always a child, so we search by distance, and keep no table.
    queue = collections.deque([("", holder)])
    seen = {id(holder)}
    while queue:
        prefix, node = queue.popleft()
        for key, child in _children(node):
            path = f"{prefix}{_legal(str(key))}"
            if child is module:
                return path
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((path + ("_" if _is_container(child) else "/"), child))
    return None


def _children(node: Any) -> list[tuple[Any, Any]]:
    """What a module or a container holds that may be, or may hold, a module."""
    if isinstance(node, Mapping):
        items = list(node.items())
    elif isinstance(node, Sequence):
        items = list(enumerate(node))
    else:
        items = list(vars(node).items())
    return [(key, child) for key, child in items if _is_container(child) or _is_module(child)]


def _is_container(node: Any) -> bool:
    return isinstance(node, Mapping | Sequence) and not isinstance(node, str | bytes)


def _is_module(node: Any) -> bool:
    return isinstance(node, sys.modules["flax.nnx"].Module)


@functools.lru_cache(maxsize=4096)
def _legal(part: str) -> str:
    """A part of a path without the characters that have a meaning on the name stack."""
    return re.sub(r"[^\w.\-]+", "_", part)
