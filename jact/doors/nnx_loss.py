"""What `flax.nnx` differentiates, as a function of arrays whose residuals are saved compressed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jact.compressed_function import Compressed
from jact.doors.nnx_pure import STATE, TAG, Pure, is_node, take_nodes
from jact.engine.compressed import Prepared
from jact.plan import Resolved


class Loss(Compressed):
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
        with nnx.update_context(TAG):
            pure, function, values = self._pure(args, kwargs)
            loss, (aux, *new) = function.run(values, {})
            out = pure.finish(((loss, aux), *new))
            return out if self._has_aux else out[0]

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool = True
    ) -> Prepared:
        """Analyses the function; see `Compressed.prepare`."""
        with nnx.update_context(TAG):
            _, function, values = self._pure(args, kwargs)
            return function.analyse(values, {}, rewritten)

    def _pure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Pure, Compressed, tuple[Any, ...]]:
        """The call as a function of arrays, compressed, and its arguments."""
        pure = Pure(self.__wrapped__, args, kwargs)
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

    def _groups(self, args: tuple[Any, ...], pure: Pure, count: int) -> list[list[int]]:
        """The positions of what is differentiated, argument by argument, and of all the rest.

        What is not known to be moving would be saved for nothing, and what is made of one
        argument alone is weights.
        """
        holders = [i for i, arg in enumerate(args) for _ in take_nodes(arg)[0]]
        owners: list[int | None] = []
        for i, arg in enumerate(pure.args):
            owners += [i if i in self._predicates else None] * len(jax.tree.leaves(arg))
        owners += [None] * (count - len(owners) - len(jax.tree.leaves(pure.kwargs[STATE])))
        entries, _ = jax.tree_util.tree_flatten_with_path(pure.kwargs[STATE], is_leaf=is_node)
        for path, variable in entries:
            _, node, *rest = (key.key for key in path)
            holder = holders[node] if node < len(holders) else None
            predicate = self._predicates.get(holder) if holder is not None else None
            moves = predicate is not None and (not rest or predicate(tuple(rest), variable))
            owners += [holder if moves else None] * len(jax.tree.leaves(variable))
        chosen = [*sorted({i for i in owners if i is not None}), None]
        return [[p for p, owner in enumerate(owners) if owner == i] for i in chosen]
