"""The NNX door: modules, their methods and functions of modules, by NNX's own protocol.

A call with modules among its arguments becomes a function of their variables and the other
arguments. What the call writes to the modules comes out as a result, and is then written to the
caller's. Variables are inputs that jact keeps by reference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jact import compat
from jact.compressed_function import Compressed
from jact.doors.nnx_loss import Loss
from jact.doors.nnx_pure import TAG, Pure, is_node, put_nodes, take_nodes
from jact.engine.compressed import Prepared
from jact.engine.linearize import is_differentiable
from jact.engine.trace import keep_filter
from jact.plan import Resolved

type Keep = int | str | Sequence[int | str]


def is_target(target: Any) -> bool:
    """Whether `target` is an NNX class or instance."""
    return isinstance(target, nnx.Pytree) or (
        isinstance(target, type) and issubclass(target, nnx.Pytree)
    )


def compress(
    target: Any, policy: Resolved | None, keep: Keep, methods: Sequence[str] | None
) -> Any:
    """Compresses an NNX class or instance; see `jact.compress`."""
    if policy is None:
        return target
    keep = keep if isinstance(keep, int | str) else tuple(keep)
    cls = target if isinstance(target, type) else type(target)
    compressed = _class(cls, policy, keep, tuple(methods or ("__call__",)))
    if isinstance(target, type):
        return compressed
    # The same attributes, in the one dictionary that both objects have.
    model = object.__new__(compressed)
    object.__setattr__(model, "__dict__", vars(target))
    return model


@functools.lru_cache(maxsize=256)
def _class(cls: type, policy: Resolved, keep: Any, methods: tuple[str, ...]) -> type:
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members["__doc__"] = cls.__doc__
    for name in methods:
        fun = getattr(cls, name, None) if name != "__call__" or _is_callable(cls) else None
        if not callable(fun):
            raise TypeError(
                f"{cls.__name__} has no method {name!r} to compress; name those to compress: "
                f"jact.compress(model, methods=[...])"
            )
        fun = fun.__wrapped__ if isinstance(fun, Compressed) else fun
        members[name] = Compressed(fun, policy, keep_filter(fun, keep))
    return type(cls)(cls.__name__, (cls,), members, pytree=cls._pytree__is_pytree)


def _is_callable(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)


def takes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are modules or variables among the arguments."""
    return any(map(is_node, jax.tree.leaves((args, kwargs), is_leaf=is_node)))


def call(function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a compressed function with modules among its arguments."""
    if function._differentiated:
        return _loss(function, args)(*args, **kwargs)
    # Outside of any trace there is nothing to differentiate.
    if not compat.any_tracer((args, kwargs)):
        return function.__wrapped__(*args, **kwargs)
    with nnx.update_context(TAG):
        pure = Pure(function.__wrapped__, args, kwargs)
        return pure.finish(pure.compressed(function).run(pure.args, pure.kwargs))


def prepare(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool
) -> Prepared:
    """Analyses a call of a compressed function with modules among its arguments."""
    if function._differentiated:
        return _loss(function, args).prepare(args, kwargs, rewritten)
    with nnx.update_context(TAG):
        pure = Pure(function.__wrapped__, args, kwargs)
        return pure.compressed(function).analyse(pure.args, pure.kwargs, rewritten)


def _loss(function: Compressed, args: tuple[Any, ...]) -> Loss:
    """A function to differentiate as `flax.nnx` would."""
    positions = [i % max(len(args), 1) for i in function._differentiated]
    parameters = dict.fromkeys(positions, nnx.Param)
    return Loss(function.__wrapped__, parameters, function._has_aux, function.policy)


def not_differentiated(args: Sequence[Any]) -> str:
    """Why `jax.grad`, to which modules are pytrees, does not take some of them; else empty."""
    for leaf in jax.tree.leaves(args, is_leaf=is_node):
        if not isinstance(leaf, nnx.Pytree):
            continue
        others = {str(x.dtype) for x in jax.tree.leaves(leaf) if not _is_differentiable(x)}
        if others:
            return (
                f"a {type(leaf).__name__} has state that has no gradient, of dtype "
                f"{', '.join(sorted(others))} (such as counts and keys of random streams). Use "
                "jact.nnx.value_and_grad or jact.nnx.grad, which take the place of flax.nnx's and "
                "differentiate the parameters alone."
            )
    return ""


def _is_differentiable(x: Any) -> bool:
    return not hasattr(x, "dtype") or is_differentiable(x.dtype)


#: What takes the place of `jax.jit` for functions with modules among their arguments.
jit = nnx.jit


def map_arrays(tree: Any, fun: Callable[[Any], Any]) -> Any:
    """A pytree with NNX objects in it, mapped like `jax.tree.map`; what is shared stays shared."""
    nodes, rest = take_nodes(tree)
    graph, state = nnx.split(nodes)
    return put_nodes(jax.tree.map(fun, rest), nnx.merge(graph, jax.tree.map(fun, state)))


@contextlib.contextmanager
def functional(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """A function with modules among its arguments, as one of arrays, and its arguments.

    What it writes to the modules is lost.
    """
    with nnx.update_context(TAG):
        pure = Pure(fun, args, kwargs)
        yield pure, pure.args, pure.kwargs


def method(function: Compressed, owner: type) -> None:
    """A compressed function can be a method of an NNX class as it is."""
    del function, owner


def is_method(method: Any) -> bool:
    """Whether a bound method is one of an NNX object."""
    return isinstance(method.__self__, nnx.Pytree)
