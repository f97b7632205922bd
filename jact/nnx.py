"""NNX: gradients like those of `flax.nnx`, with compressed residuals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from jact.doors.nnx_loss import Loss
from jact.plan import PolicyLike, resolve

__all__ = ["grad", "value_and_grad"]

type DiffArgument = int | nnx.DiffState


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
    loss = Loss(f, differentiated, has_aux, resolve(policy))
    transformed = transform(loss, argnums=argnums, has_aux=has_aux, **options, **modes)

    @functools.wraps(loss)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return transformed(*args, **kwargs)

    return gradient
