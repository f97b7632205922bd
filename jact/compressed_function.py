"""A function whose residuals are saved compressed: how it is called, traced and analysed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jact import compat, doors, guidance
from jact.engine.compressed import Prepared, compressed, prepare
from jact.engine.trace import Traced, function_name
from jact.plan import Adaptive, Plan, Resolved
from jact.policy import Policy


class Compressed:
    """A function whose residuals are saved compressed: what `jact.compress` returns.

    Attributes:
        __wrapped__: the function as it was.
        policy: how residuals are stored; None leaves the function alone.
        is_kept: whether the argument at a position or of a name is kept by reference.
        any_library: whether modules among the arguments of a function to differentiate are
            differentiated as their own library does, rather than as `jax.grad` would.
    """

    any_library = False
    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fun: Callable[..., Any],
        policy: Resolved | None,
        is_kept: Callable[[int | str], bool],
        has_aux: bool = False,
        differentiated: Sequence[int] = (),
    ):
        functools.update_wrapper(self, fun)
        self.policy = policy
        self.is_kept = is_kept
        self._has_aux = has_aux
        self._differentiated = differentiated
        self._instance: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        args = (*self._instance, *args)
        if self.policy is None:
            return self.__wrapped__(*args, **kwargs)
        door = self._door(args, kwargs)
        if door is not None:
            return door.call(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function with arguments that are pytrees of arrays, whatever their nodes."""
        assert self.policy is not None
        if isinstance(self.policy, Adaptive):
            return self.policy.run(self, args, kwargs)
        traced = self.trace(args, kwargs)
        # A plan says what is saved, so nothing else may be.
        if not isinstance(self.policy, Plan):
            traced.specialise()
        return self.run_traced(traced)

    def run_traced(self, traced: Traced) -> Any:
        """Calls the function as it was traced, at its own arguments."""
        assert isinstance(self.policy, Policy | Plan)
        run = compressed(
            traced.closed,
            traced.inputs,
            traced.num_differentiated_outputs,
            self.policy,
            traced.name,
            weights=traced.weights,
        )
        try:
            return traced.unflatten(run(*traced.values))
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                f"{self!r} cannot be differentiated in forward mode (jax.jvp, jax.jacfwd): what it "
                'saves compressed serves a backward pass alone. Use reverse mode, or policy="off".'
            ) from error

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool = True
    ) -> Prepared:
        """Traces and analyses the function at some arguments, arrays or types; see `prepare`.

        Raises:
            ValueError: when the policy is "off".
            TypeError: when a function to differentiate does not return a scalar.
        """
        if self.policy is None:
            raise ValueError(
                'policy "off" leaves the function as it is: there is nothing to analyse'
            )
        args = (*self._instance, *args)
        door = self._door(args, kwargs)
        if door is not None:
            return door.prepare(self, args, kwargs, rewritten)
        return self.analyse(args, kwargs, rewritten)

    def analyse(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool = True
    ) -> Prepared:
        """`prepare` for arguments that are pytrees of arrays, whatever their nodes."""
        traced = self.trace(args, kwargs)
        guidance.refuse_symbolic(traced)
        outs = [v.aval.shape for v in traced.closed.jaxpr.outvars]
        if self._differentiated and outs[: traced.num_differentiated_outputs] != [()]:
            raise TypeError(
                f"{traced.name} must return a scalar, or with has_aux=True a pair of a scalar and "
                f"auxiliary data; it returns arrays of shapes {outs}"
            )
        return prepare(
            traced.closed,
            traced.values,
            traced.inputs,
            traced.num_differentiated_outputs,
            self.basis,
            rewritten,
        )

    def is_gradient(self, args: Any) -> bool:
        """Whether a call with these arguments is seen to be differentiated."""
        return bool(self._differentiated) or any(
            map(compat.is_differentiated, jax.tree.leaves(args))
        )

    @property
    def basis(self) -> Policy | Plan:
        """The policy or plan to analyse the function under."""
        assert self.policy is not None
        return self.policy.current if isinstance(self.policy, Adaptive) else self.policy

    def under(self, policy: Policy | Plan) -> Compressed:
        """The same function under another policy."""
        function = copy.copy(self)
        function.policy = policy
        return function

    def _door(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        # What `jax.grad` differentiates with respect to a module gets a copy of it.
        pytrees = self._differentiated and not self.any_library
        return None if pytrees else doors.of_call(args, kwargs)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The function traced at some arguments that are pytrees of arrays."""
        differentiated = [n % max(len(args), 1) for n in self._differentiated]
        fun = self.__wrapped__
        with guidance.on_tracing():
            traced = Traced(fun, args, kwargs, self.is_kept, self._has_aux, differentiated)
        if self.is_gradient(traced.values):
            guidance.refuse_symbolic(traced)
        return traced

    def __set_name__(self, owner: type, name: str) -> None:
        # Flax looks at the methods of a new class, and wants functions.
        door = doors.of_owner(owner)
        method = None if door is None else door.method(self, owner)
        if method is not None:
            setattr(owner, name, method)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = copy.copy(self)
        bound._instance = (*self._instance, instance)
        return bound

    def __repr__(self) -> str:
        return f"jact.compress({function_name(self.__wrapped__)})"
