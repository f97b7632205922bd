"""Calls with NNX objects among their arguments, as functions of arrays.

The objects are split into a graph and a state by NNX's own protocol for transformations, and what
a call writes to them comes out as a result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jact.compressed_function import Compressed
from jact.engine.scopes import in_scope

#: Of NNX's update context.
TAG = "jact"

#: The name under which the pure function of a call takes the state of its objects; so the other
#: arguments stay what and where they are.
STATE = "state of the modules"


class Pure:
    """A call with NNX objects among its arguments, as a function of arrays.

    Must be made, called and finished within one `nnx.update_context`.

    Attributes:
        args: the call's positional arguments, with placeholders for objects.
        kwargs: its keyword arguments, likewise, and the objects' state.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._fun = fun
        self._nodes, (self.args, self.kwargs) = take_nodes((args, kwargs))
        with nnx.split_context(TAG) as context:
            self._graph, self.kwargs[STATE] = context.split((self._nodes, []))

    def compressed(self, function: Compressed) -> Compressed:
        """The pure function, compressed as `function` is, with the state kept by reference."""

        def is_kept(where: int | str) -> bool:
            return where == STATE or function.is_kept(where)

        @functools.wraps(self._fun)
        def pure(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return Compressed(pure, function.policy, is_kept)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Calls the function; returns its result, and the new graph and state of all objects."""
        state = kwargs.pop(STATE)
        with nnx.merge_context(TAG, inner=True) as context:
            nodes, _ = context.merge(self._graph, state)
        args, kwargs = put_nodes((args, kwargs), nodes)
        out_nodes, out = take_nodes(_call(self._fun, args, kwargs))
        with nnx.split_context(TAG) as context:
            graph, new_state = context.split((nodes, out_nodes))
        return out, graph, _changes(state, new_state)

    def finish(self, result: tuple[Any, Any, Any]) -> Any:
        """Writes what has changed to the caller's objects; returns the function's own result."""
        out, graph, changes = result
        old = self.kwargs[STATE]
        new = _changed(old, changes)
        if self._write(graph, old, new):
            return out
        with nnx.merge_context(TAG, inner=False) as context:
            _, nodes = context.merge(graph, new)
        return put_nodes(out, nodes)

    def _write(self, graph: Any, old: Any, new: Any) -> bool:
        """Writes to variables alone, if no more than that has changed.

        So a module of an outer trace may be read, or be one of several of which others are written
        to; NNX lets nobody write to it.
        """
        if graph.with_no_outer_index() != self._graph.with_no_outer_index():
            return False
        before, after = (jax.tree.leaves(state, is_leaf=is_node) for state in (old, new))
        pairs = list(zip(before, after, strict=True))
        if any(a is not b for a, b in pairs if not isinstance(a, nnx.Variable)):
            return False
        moved = [(a, b) for a, b in pairs if isinstance(a, nnx.Variable)]
        written = [a.get_raw_value() is not b.get_raw_value() for a, b in moved]
        if not any(written):
            return True
        # Arrays that are attributes by themselves are listed, too.
        leaves = jax.tree.leaves(nnx.variables(self._nodes), is_leaf=is_node)
        variables = [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]
        for variable, (_, new_variable), changed in zip(variables, moved, written, strict=True):
            if changed:
                variable.set_raw_value(new_variable.get_raw_value())
        return True


def _call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function; if it is about a module, as if it were the module's `__call__`.

    So layers are named after their place in the module, as they are when it is called itself.
    """
    if not args or not isinstance(args[0], nnx.Module):
        return fun(*args, **kwargs)

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return fun(self, *args, **kwargs)

    return in_scope(__call__)(*args, **kwargs)


class _Placeholder:
    """Stands for an NNX object among arguments or results."""


def is_node(x: Any) -> bool:
    """Whether something is an NNX object or a variable by itself."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def take_nodes(tree: Any) -> tuple[list[Any], Any]:
    """The NNX objects in a pytree, and the pytree with placeholders for them."""
    leaves, definition = jax.tree.flatten(tree, is_leaf=is_node)
    nodes = [leaf for leaf in leaves if is_node(leaf)]
    leaves = [_Placeholder() if is_node(leaf) else leaf for leaf in leaves]
    return nodes, jax.tree.unflatten(definition, leaves)


def put_nodes(tree: Any, nodes: Sequence[Any]) -> Any:
    """Replaces the placeholders in a pytree by NNX objects."""
    rest = iter(nodes)
    return jax.tree.map(lambda x: next(rest) if isinstance(x, _Placeholder) else x, tree)


@dataclasses.dataclass(frozen=True)
class _Unchanged:
    """Stands for a value that a call has left as it was."""

    position: int


def _changes(old: Any, new: Any) -> tuple[list[Any], Any]:
    """The values of a new state, as far as they are not among those of an old one."""
    positions = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(old))}
    leaves, definition = jax.tree.flatten(new)
    # What went through a compressed function comes out as another tracer, even if it is the same.
    return [_Unchanged(positions[id(x)]) if id(x) in positions else x for x in leaves], definition


def _changed(old: Any, changes: tuple[list[Any], Any]) -> Any:
    """The new state, from the old one and what has changed."""
    values = jax.tree.leaves(old)
    leaves, definition = changes
    leaves = [values[x.position] if isinstance(x, _Unchanged) else x for x in leaves]
    return jax.tree.unflatten(definition, leaves)
