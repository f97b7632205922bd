"""From a user's function and arguments to a flat traced function."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jact import compat
from jact.engine.linearize import is_differentiable
from jact.engine.origins import Input
from jact.engine.scopes import module_scopes


class Traced:
    """A function traced at some arguments.

    Attributes:
        name: the function's name.
        closed: the traced function; what it closes over are its constants.
        values: the constants and the array arguments, in the order of `closed`.
        inputs: what the engine needs to know of each of `values`.
        num_differentiated_outputs: how many of the first results are not auxiliary.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_kept: Callable[[int | str], bool],
        has_aux: bool = False,
        differentiated: Sequence[int] = (),
    ):
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        slots = _slots(leaves)
        self._static_outputs: dict[int, Any] = {}
        self._out_tree: Any = None
        self.num_differentiated_outputs = 0

        def flat(*values: Any) -> list[Any]:
            full = list(leaves)
            for positions, value in zip(slots, values, strict=True):
                for i in positions:
                    full[i] = value
            new_args, new_kwargs = jax.tree.unflatten(tree, full)
            with _unchanged_modules((new_args, new_kwargs), self.name):
                out = fun(*new_args, **new_kwargs)
            return self._flatten_output(out, has_aux)

        self.name = function_name(fun)
        array_leaves = [leaves[positions[0]] for positions in slots]
        names = {i: _name(paths[i][0]) for positions in slots for i in positions}
        array_names = [names[positions[0]] for positions in slots]
        types = [compat.type_of(leaf) for leaf in array_leaves]
        with module_scopes():
            self.closed: Any = compat.trace(flat, types, _source(fun), array_names)
        self.values = [*self.closed.consts, *array_leaves]
        # Which gradients may be asked for must not depend on who asks: JAX keeps the form of the
        # residuals of a call that it has traced, whatever it is differentiated with respect to
        # later. Only `jact.grad` and `jact.value_and_grad` know.
        self.inputs = [
            Input(f"closed over: {_describe(c)}", wanted=not differentiated)
            for c in self.closed.consts
        ]
        for positions, aval in zip(slots, types, strict=True):
            inputs = [
                self._input(paths[i][0], names[i], aval, is_kept, differentiated) for i in positions
            ]
            # An array that is passed twice is kept by reference if one of the arguments is.
            self.inputs.append(min(inputs, key=lambda spec: spec.encoded))

    def _input(
        self,
        path: Any,
        name: str,
        aval: Any,
        is_kept: Callable[[int | str], bool],
        differentiated: Sequence[int],
    ) -> Input:
        # A path is the position in (args, kwargs), then the position or the name, then the path
        # within the argument.
        where = path[1].idx if hasattr(path[1], "idx") else path[1].key
        encoded = not is_kept(where) and is_differentiable(aval.dtype)
        weights = isinstance(where, int) and (where in differentiated)
        return Input(
            name, where if weights else None, encoded, wanted=weights or not differentiated
        )

    @property
    def wanted(self) -> list[int]:
        """Positions of the values whose gradients may be asked for."""
        return [
            i
            for i, (spec, value) in enumerate(zip(self.inputs, self.values, strict=True))
            if spec.wanted and is_differentiable(compat.type_of(value).dtype)
        ]

    def specialise(self) -> None:
        """Takes account of what is being differentiated with respect to, where that can be seen.

        Other inputs need no gradient. An argument of the function that is traced around (a batch or
        a parameter, of a jitted training step) lives anyway, and is no activation.
        """
        if not any(map(compat.is_differentiated, self.values)):
            return
        fixed = compat.undifferentiated(self.values)
        self.inputs = [
            dataclasses.replace(
                spec,
                wanted=spec.wanted and not still,
                encoded=spec.encoded
                and not ((still or compat.is_differentiated(value)) and compat.is_argument(value)),
            )
            for spec, value, still in zip(self.inputs, self.values, fixed, strict=True)
        ]

    @property
    def weights(self) -> list[int]:
        """The inputs that are kept by reference and are seen to be differentiated."""
        return [
            i
            for i, (spec, value) in enumerate(zip(self.inputs, self.values, strict=True))
            if compat.is_differentiated(value) and not spec.encoded
        ]

    def _flatten_output(self, out: Any, has_aux: bool) -> list[Any]:
        if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
            raise TypeError(
                "with has_aux=True the function must return a pair (output, auxiliary data), "
                f"got {'an array' if _is_array(out) else type(out).__name__}"
            )
        leaves, self._out_tree = jax.tree.flatten(out)
        num_main = len(jax.tree.leaves(out[0])) if has_aux else len(leaves)
        self._static_outputs = {i: leaf for i, leaf in enumerate(leaves) if not _is_array(leaf)}
        arrays = [i for i in range(len(leaves)) if i not in self._static_outputs]
        self.num_differentiated_outputs = sum(i < num_main for i in arrays)
        return [leaves[i] for i in arrays]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The function's output, from its arrays."""
        rest = iter(arrays)
        count = len(arrays) + len(self._static_outputs)
        leaves = [
            self._static_outputs[i] if i in self._static_outputs else next(rest)
            for i in range(count)
        ]
        return jax.tree.unflatten(self._out_tree, leaves)


def _name(path: Any) -> str:
    """What the user calls an array in an argument: `args[1]['image']`."""
    return ("args" if path[0].idx == 0 else "kwargs") + jax.tree_util.keystr(path[1:])


def _source(fun: Callable[..., Any]) -> str:
    """A function's name and the line where it is defined, for messages."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    name = function_name(fun)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _slots(leaves: Sequence[Any]) -> list[list[int]]:
    """The positions of the array leaves, those of one and the same traced value together.

    What is passed twice, as the queries and the keys of an attention layer are, is encoded once.
    """
    slots: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if _is_array(leaf):
            slots.setdefault(("same", id(leaf)) if compat.is_tracer(leaf) else i, []).append(i)
    return list(slots.values())


def keep_filter(
    fun: Callable[..., Any], keep: int | str | Sequence[int | str]
) -> Callable[[int | str], bool]:
    """Whether the argument at a position or of a name is kept by reference."""
    chosen = tuple(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else (keep,)
    for where in chosen:
        if isinstance(where, bool) or not isinstance(where, int | str):
            raise TypeError(f"keep must hold positions or names of arguments, got {where!r}")
        if isinstance(where, int) and where < 0:
            raise ValueError(f"keep must not hold negative positions, got {where}")
    kept = set(chosen)
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return kept.__contains__
    # An argument is the same whether it is passed by position or by name.
    for position, parameter in enumerate(parameters):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and kept & {position, parameter.name}:
            kept |= {position, parameter.name}
    kinds = {parameter.kind for parameter in parameters}
    named = {parameter.name for parameter in parameters}
    for where in chosen:
        if isinstance(where, str):
            known = where in named or inspect.Parameter.VAR_KEYWORD in kinds
        else:
            positional = sum(
                p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
            )
            known = where < positional or inspect.Parameter.VAR_POSITIONAL in kinds
        # The default must do no harm to a function without arguments.
        if not known and chosen != (0,):
            raise ValueError(
                f"keep names the argument {where!r}, but {function_name(fun)} has "
                f"{', '.join(named) or 'none'}"
            )
    return kept.__contains__


@contextlib.contextmanager
def _unchanged_modules(args: Any, name: str) -> Iterator[None]:
    """Sees to it that no state of an NNX module is lost.

    A function differentiated as `jax.grad` does is given copies of the modules among its arguments.
    What it writes to them (BatchNorm statistics, the counts of random streams) would never reach
    the caller's.

    Raises:
        ValueError: when the function has written to a module, once it has run.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield
        return
    leaves = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Module))
    modules = [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]
    before = [jax.tree.leaves(module) for module in modules]
    yield
    for module, old in zip(modules, before, strict=True):
        new = jax.tree.leaves(module)
        if len(new) != len(old) or any(a is not b for a, b in zip(new, old, strict=True)):
            raise ValueError(
                f"{name} writes to the state of its argument, a {type(module).__name__} (BatchNorm "
                "statistics and counts of random streams are such state), and what it writes would "
                "be lost, as under jax.value_and_grad. Use jact.nnx.value_and_grad (or "
                "jact.nnx.grad), which takes the place of flax.nnx.value_and_grad."
            )


def split_arrays(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[int, Any], Callable[[dict[int, Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arrays among a call's arguments, for `jax.jit`, which takes nothing else.

    Returns:
        The arrays, and what puts others of their kind into their places.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))

    def call(arrays: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])

    return {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}, call


def function_name(fun: Callable[..., Any]) -> str:
    """What a user calls a function; of a module's `__call__`, that is the module's class."""
    name = getattr(fun, "__name__", None) or type(fun).__name__
    if name == "__call__":
        owner = fun.__qualname__.split("<locals>.")[-1].removesuffix(".__call__")
        name = owner or name
    return name


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is traced; every other leaf is static, NumPy's scalars as Python's are."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV" and _has_jax_type(leaf)


def _has_jax_type(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _describe(const: Any) -> str:
    aval = compat.type_of(const)
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
