"""NNX modules: the door of `jact.compress`, and gradients like those of `flax.nnx`.

A call with modules among its arguments becomes a function of their variables and the other
arguments, by NNX's own protocol for transformations. What the call writes to the modules comes out
as a result, and is then written to the caller's. Variables are inputs that jact keeps by reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jact import compat
from jact.engine.compressed import Prepared
from jact.engine.linearize import is_differentiable
from jact.engine.scopes import in_scope
from jact.engine.trace import keep_filter
from jact.plan import PolicyLike, Resolved, resolve
from jact.transform import Compressed

__all__ = ["grad", "value_and_grad"]

type Keep = int | str | Sequence[int | str]
type DiffArgument = int | nnx.DiffState

_TAG = "jact"

#: The name under which the pure function of a call takes the state of its objects; so the other
#: arguments stay what and where they are.
_STATE = "state of the modules"


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: DiffArgument | Sequence[DiffArgument] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    policy: PolicyLike = "int4",
) -> Callable[..., Any]:
    """`flax.nnx.value_and_grad` with compressed residuals.

    The value, and what the function writes to its modules (BatchNorm statistics, counts of random
    streams, variables of any type), are those of the plain function. The gradient has the structure
    of the plain one, a `State` for a module. Every argument outlives the call, so arguments are
    never encoded.

    Args:
        f: the function to differentiate; returns a scalar, or a pair of a scalar and auxiliary
            data. Omitted, the result is a decorator.
        argnums: which positional arguments to differentiate with respect to: integers, or
            `nnx.DiffState`s, which name the variables of a module as well.
        has_aux: whether `f` returns auxiliary data as well.
        holomorphic: as in `flax.nnx.value_and_grad`.
        allow_int: as in `flax.nnx.value_and_grad`.
        reduce_axes: as in `flax.nnx.value_and_grad`.
        graph: as in `flax.nnx.value_and_grad`: graph mode or tree mode.
        graph_updates: as in `flax.nnx.value_and_grad`.
        policy: how residuals are stored; see `jact.compress`.

    Returns:
        A function with the arguments of `f`, returning `(value, gradient)`, or `((value, aux),
        gradient)`.

    Raises:
        TypeError: as `flax.nnx.value_and_grad` does, and for a policy of the wrong type.
        ValueError: for an unknown preset.

    >>> import jax.numpy as jnp, jact
    >>> from flax import nnx
    >>> model = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
    >>> def loss(model, x):
    ...     return jnp.mean(jnp.tanh(model(x)) ** 2)
    >>> value, gradient = jact.nnx.value_and_grad(loss)(model, jnp.ones((256, 32)))
    >>> type(gradient).__name__, gradient["kernel"].shape
    ('State', (32, 4))
    """
    options = dict(holomorphic=holomorphic, allow_int=allow_int, reduce_axes=reduce_axes)
    modes = dict(graph=graph, graph_updates=graph_updates)
    return _gradient(nnx.value_and_grad, f, argnums, has_aux, policy, options, modes)


def grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: DiffArgument | Sequence[DiffArgument] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
    policy: PolicyLike = "int4",
) -> Callable[..., Any]:
    """`flax.nnx.grad` with compressed residuals; see `jact.nnx.value_and_grad`.

    >>> import jax.numpy as jnp, jact
    >>> from flax import nnx
    >>> model = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
    >>> gradient = jact.nnx.grad(lambda model, x: model(x).sum())(model, jnp.ones((256, 32)))
    >>> gradient["bias"][...]
    Array([256., 256., 256., 256.], dtype=float32)
    """
    options = dict(holomorphic=holomorphic, allow_int=allow_int, reduce_axes=reduce_axes)
    modes = dict(graph=graph, graph_updates=graph_updates)
    return _gradient(nnx.grad, f, argnums, has_aux, policy, options, modes)


def _gradient(
    transform: Callable[..., Any],
    f: Callable[..., Any] | None,
    argnums: DiffArgument | Sequence[DiffArgument],
    has_aux: bool,
    policy: PolicyLike,
    options: dict[str, Any],
    modes: dict[str, bool | None],
) -> Callable[..., Any]:
    """`flax.nnx`'s own transformation of the function, compressed."""
    if f is None:
        return functools.partial(
            _gradient,
            transform,
            argnums=argnums,
            has_aux=has_aux,
            policy=policy,
            options=options,
            modes=modes,
        )
    chosen = (argnums,) if isinstance(argnums, int | nnx.DiffState) else tuple(argnums)
    # An integer means a module's parameters, or, where modules are plain pytrees, all of them.
    everything = ... if False in modes.values() else nnx.Param
    differentiated = {
        x.argnum if isinstance(x, nnx.DiffState) else x: (
            x.filter if isinstance(x, nnx.DiffState) else everything
        )
        for x in chosen
    }
    loss = _Loss(f, differentiated, has_aux, resolve(policy))
    transformed = transform(loss, argnums=argnums, has_aux=has_aux, **options, **modes)

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return transformed(*args, **kwargs)

    return gradient


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
    return any(map(_is_node, jax.tree.leaves((args, kwargs), is_leaf=_is_node)))


def call(function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a compressed function with modules among its arguments."""
    if function._differentiated:
        return _loss(function, args)(*args, **kwargs)
    # Outside of any trace there is nothing to differentiate.
    if not compat.any_tracer((args, kwargs)):
        return function.__wrapped__(*args, **kwargs)
    with nnx.update_context(_TAG):
        pure = _Pure(function.__wrapped__, args, kwargs)
        return pure.finish(pure.compressed(function).run(pure.args, pure.kwargs))


def prepare(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool
) -> Prepared:
    """Analyses a call of a compressed function with modules among its arguments."""
    if function._differentiated:
        return _loss(function, args).prepare(args, kwargs, rewritten)
    with nnx.update_context(_TAG):
        pure = _Pure(function.__wrapped__, args, kwargs)
        return pure.compressed(function).analyse(pure.args, pure.kwargs, rewritten)


def _loss(function: Compressed, args: tuple[Any, ...]) -> _Loss:
    """A function to differentiate as `flax.nnx` would."""
    positions = [i % max(len(args), 1) for i in function._differentiated]
    parameters = dict.fromkeys(positions, nnx.Param)
    return _Loss(function.__wrapped__, parameters, function._has_aux, function.policy)


def not_differentiated(args: Sequence[Any]) -> str:
    """Why `jax.grad`, to which modules are pytrees, does not take some of them; else empty."""
    for leaf in jax.tree.leaves(args, is_leaf=_is_node):
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
    nodes, rest = _take_nodes(tree)
    graph, state = nnx.split(nodes)
    return _put_nodes(jax.tree.map(fun, rest), nnx.merge(graph, jax.tree.map(fun, state)))


@contextlib.contextmanager
def functional(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """A function with modules among its arguments, as one of arrays, and its arguments.

    What it writes to the modules is lost.
    """
    with nnx.update_context(_TAG):
        pure = _Pure(fun, args, kwargs)
        yield pure, pure.args, pure.kwargs


def method(function: Compressed, owner: type) -> None:
    """A compressed function can be a method of an NNX class as it is."""
    del function, owner


def is_method(method: Any) -> bool:
    """Whether a bound method is one of an NNX object."""
    return isinstance(method.__self__, nnx.Pytree)


class _Pure:
    """A call with NNX objects among its arguments, as a function of arrays.

    Must be made, called and finished within one `nnx.update_context`.

    Attributes:
        args: the call's positional arguments, with placeholders for objects.
        kwargs: its keyword arguments, likewise, and the objects' state.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._fun = fun
        self._nodes, (self.args, self.kwargs) = _take_nodes((args, kwargs))
        with nnx.split_context(_TAG) as context:
            self._graph, self.kwargs[_STATE] = context.split((self._nodes, []))

    def compressed(self, function: Compressed) -> Compressed:
        """The pure function, compressed as `function` is, with the state kept by reference."""

        def is_kept(where: int | str) -> bool:
            return where == _STATE or function.is_kept(where)

        @functools.wraps(self._fun)
        def pure(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return Compressed(pure, function.policy, is_kept)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Calls the function; returns its result, and the new graph and state of all objects."""
        state = kwargs.pop(_STATE)
        with nnx.merge_context(_TAG, inner=True) as context:
            nodes, _ = context.merge(self._graph, state)
        args, kwargs = _put_nodes((args, kwargs), nodes)
        out_nodes, out = _take_nodes(_call(self._fun, args, kwargs))
        with nnx.split_context(_TAG) as context:
            graph, new_state = context.split((nodes, out_nodes))
        return out, graph, _changes(state, new_state)

    def finish(self, result: tuple[Any, Any, Any]) -> Any:
        """Writes what has changed to the caller's objects; returns the function's own result."""
        out, graph, changes = result
        old = self.kwargs[_STATE]
        new = _changed(old, changes)
        if self._write(graph, old, new):
            return out
        with nnx.merge_context(_TAG, inner=False) as context:
            _, nodes = context.merge(graph, new)
        return _put_nodes(out, nodes)

    def _write(self, graph: Any, old: Any, new: Any) -> bool:
        """Writes to variables alone, if no more than that has changed.

        So a module of an outer trace may be read, or be one of several of which others are written
        to; NNX lets nobody write to it.
        """
        if graph.with_no_outer_index() != self._graph.with_no_outer_index():
            return False
        before, after = (jax.tree.leaves(state, is_leaf=_is_node) for state in (old, new))
        pairs = list(zip(before, after, strict=True))
        if any(a is not b for a, b in pairs if not isinstance(a, nnx.Variable)):
            return False
        moved = [(a, b) for a, b in pairs if isinstance(a, nnx.Variable)]
        written = [a.get_raw_value() is not b.get_raw_value() for a, b in moved]
        if not any(written):
            return True
        # Arrays that are attributes by themselves are listed, too.
        leaves = jax.tree.leaves(nnx.variables(self._nodes), is_leaf=_is_node)
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


class _Loss(Compressed):
    """A function to differentiate by `flax.nnx`, whose residuals are saved compressed."""

    def __init__(
        self,
        fun: Callable[..., Any],
        differentiated: Mapping[int, nnx.filterlib.Filter],
        has_aux: bool,
        policy: Resolved | None,
    ):
        super().__init__(fun, policy, lambda where: True, has_aux, tuple(differentiated))
        if isinstance(fun, functools.partial):
            # To NNX, a partial takes positional arguments alone; its keywords are settled.
            self.__signature__ = inspect.signature(lambda *args: None)
        self._predicates = {i: nnx.filterlib.to_predicate(f) for i, f in differentiated.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with what NNX differentiates."""
        if self.policy is None:
            return self.__wrapped__(*args, **kwargs)
        with nnx.update_context(_TAG):
            pure, function, values = self._pure(args, kwargs)
            loss, (aux, *new) = function.run(values, {})
            out = pure.finish(((loss, aux), *new))
            return out if self._has_aux else out[0]

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool = True
    ) -> Prepared:
        """Analyses the function; see `Compressed.prepare`."""
        with nnx.update_context(_TAG):
            _, function, values = self._pure(args, kwargs)
            return function.analyse(values, {}, rewritten)

    def _pure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Pure, Compressed, tuple[Any, ...]]:
        """The call as a function of arrays, compressed, and its arguments."""
        pure = _Pure(self.__wrapped__, args, kwargs)
        leaves, definition = jax.tree.flatten((pure.args, pure.kwargs))
        groups = self._groups(args, pure, len(leaves))

        @functools.wraps(self.__wrapped__)
        def of_groups(*values: Sequence[Any]) -> Any:
            full = [None] * len(leaves)
            for group, chosen in zip(groups, values, strict=True):
                for position, value in zip(group, chosen, strict=True):
                    full[position] = value
            new_args, new_kwargs = jax.tree.unflatten(definition, full)
            out, graph, changes = pure(*new_args, **new_kwargs)
            if not self._has_aux:
                return out, (None, graph, changes)
            loss, aux = out
            return loss, (aux, graph, changes)

        moving = range(len(groups) - 1)
        function = Compressed(of_groups, self.policy, self.is_kept, True, moving)
        return pure, function, tuple([leaves[p] for p in group] for group in groups)

    def _groups(self, args: tuple[Any, ...], pure: _Pure, count: int) -> list[list[int]]:
        """The positions of what is differentiated, argument by argument, and of all the rest.

        What is not known to be moving would be saved for nothing, and what is made of one
        argument alone is weights.
        """
        holders = [i for i, arg in enumerate(args) for _ in _take_nodes(arg)[0]]
        owners: list[int | None] = []
        for i, arg in enumerate(pure.args):
            owners += [i if i in self._predicates else None] * len(jax.tree.leaves(arg))
        owners += [None] * (count - len(owners) - len(jax.tree.leaves(pure.kwargs[_STATE])))
        entries, _ = jax.tree_util.tree_flatten_with_path(pure.kwargs[_STATE], is_leaf=_is_node)
        for path, variable in entries:
            _, node, *rest = (key.key for key in path)
            holder = holders[node] if node < len(holders) else None
            predicate = self._predicates.get(holder) if holder is not None else None
            moves = predicate is not None and (not rest or predicate(tuple(rest), variable))
            owners += [holder if moves else None] * len(jax.tree.leaves(variable))
        chosen = [*sorted({i for i in owners if i is not None}), None]
        return [[p for p, owner in enumerate(owners) if owner == i] for i in chosen]


class _Placeholder:
    """Stands for an NNX object among arguments or results."""


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _take_nodes(tree: Any) -> tuple[list[Any], Any]:
    """Replaces the NNX objects in a pytree by placeholders."""
    leaves, definition = jax.tree.flatten(tree, is_leaf=_is_node)
    nodes = [leaf for leaf in leaves if _is_node(leaf)]
    leaves = [_Placeholder() if _is_node(leaf) else leaf for leaf in leaves]
    return nodes, jax.tree.unflatten(definition, leaves)


def _put_nodes(tree: Any, nodes: Sequence[Any]) -> Any:
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
