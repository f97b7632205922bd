"""What is said of uses that cannot work, and what to do instead."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export

from jact import compat, doors
from jact.engine.trace import Traced

#: What JAX raises where Python asks for the value of an array that is being traced.
_NOT_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_ON_TRACING = (
    "jact traces the whole function, as jax.jit does, also where jax.grad alone would not: use "
    "jax.lax.cond or jnp.where, or compute it before and close over it."
)


@contextlib.contextmanager
def on_tracing() -> Iterator[None]:
    """Adds a note to what JAX raises where Python asks for the value of a traced array."""
    try:
        yield
    except _NOT_TRACED as error:
        # Compressed functions within each other are traced within each other.
        if _ON_TRACING not in getattr(error, "__notes__", ()):
            error.add_note(_ON_TRACING)
        raise


def refuse_symbolic(traced: Traced) -> None:
    """Raises where a size is unknown, as what is saved is chosen by sizes.

    Raises:
        NotImplementedError: a size is symbolic.
    """
    for spec, value in zip(traced.inputs, traced.values, strict=True):
        shape = compat.type_of(value).shape
        if any(not isinstance(n, int) and jax.export.is_symbolic_dim(n) for n in shape):
            sizes = ", ".join(map(str, shape))
            raise NotImplementedError(
                f"{traced.name} cannot be differentiated at symbolic shapes "
                f"(jax.export.symbolic_shape), as that of {spec.name}, ({sizes}): what "
                'is saved is chosen by sizes. Export it for each shape, or use policy="off".'
            )


def positions(argnums: Any) -> tuple[int, ...]:
    """The positions that `argnums` names.

    Raises:
        TypeError: it is something else, such as the arguments to differentiate at.
    """
    for read in (lambda: (operator.index(argnums),), lambda: tuple(map(operator.index, argnums))):
        with contextlib.suppress(TypeError):
            return read()
    raise TypeError(
        "argnums must be an integer or a sequence of integers, got "
        f"{argnums if isinstance(argnums, float) else type(argnums).__name__}; the result is a "
        "function, to be called with the arguments: jact.value_and_grad(loss)(params, batch)"
    )


def on_modules(gradient: Callable[..., Any], argnums: Any, allow_int: bool) -> Callable[..., Any]:
    """A gradient that says what to do with modules whose state JAX does not differentiate."""
    if allow_int:
        return gradient

    @functools.wraps(gradient)
    def explaining(*args: Any, **kwargs: Any) -> Any:
        try:
            return gradient(*args, **kwargs)
        except TypeError as error:
            chosen = [args[i] for i in positions(argnums) if -len(args) <= i < len(args)]
            if message := doors.not_differentiated(chosen):
                raise TypeError(message) from error
            raise

    return explaining
