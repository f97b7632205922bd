"""The per-layer study: how far the gradient errs when one residual is stored by one codec."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from jact.adapt import exact
from jact.adapt import layout as layouts
from jact.adapt.probe import Probe
from jact.adapt.table import Sensitivities
from jact.codecs import Codec
from jact.plan import PolicyLike

METHODS = ("local", "exact")


def sensitivity(
    fun: Callable[..., Any],
    codecs: Sequence[Codec | str] = ("int8", "int4", "int2"),
    *,
    policy: PolicyLike = "int4",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    method: Literal["local", "exact"] = "local",
    samples: int | None = None,
    seed: int = 0,
) -> Callable[..., Sensitivities]:
    """Tells how much the compression of each residual hurts the gradient.

    Args:
        fun: a function to differentiate; or the result of `jact.grad` or `jact.value_and_grad`,
            which bring their own policy and arguments to differentiate.
        codecs: the candidates: codecs, or names of presets such as "int4" and "pool2".
        policy: chooses which values are saved; see `jact.compress`. Its own codecs do not matter
            but for that choice.
        argnums: as in `jact.value_and_grad`.
        has_aux: as in `jact.value_and_grad`.
        method: "local" estimates the errors of all residuals and codecs from one backward pass
            through the backward pass, to first order in the error, and those of biased codecs from
            one more for each. "exact" measures: it rounds one residual at a time and runs the whole
            gradient, `samples` times for each residual and codec.
        samples: how many random directions ("local") or draws of the rounding ("exact") to average
            over; 1 and 2 when None.
        seed: of all random numbers.

    Returns:
        A function with the arguments of `fun` that returns the table. It compiles and runs the
        function itself, and touches neither its state nor its random streams: what `fun` returns is
        dropped.

    Raises:
        TypeError: when `fun` is not callable, or for codecs or a policy of the wrong type.
        ValueError: for an unknown codec, policy or method, or `samples` below 1.

    References:
        Liu et al., GACT, ICML 2022, section 4.2, for the exact method; Hutchinson, A Stochastic
        Estimator of the Trace of the Influence Matrix, 1990, for the random directions.

    >>> import jax, jax.numpy as jnp, jact
    >>> def loss(params, x):
    ...     return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> params = [jax.random.normal(k, (64, 64)) / 8 for k in keys[:2]]
    >>> x = jax.random.normal(keys[2], (256, 64))
    >>> table = jact.sensitivity(loss, codecs=["int4", "int2"])(params, x)
    >>> table.names
    ('dot_general', 'dot_general:1')
    >>> [codec.name for codec in table.codecs]
    ['keep', 'int4', 'int2']
    >>> bool((table.error[:, 1] < table.error[:, 2]).all())
    True
    >>> table.plan([1, 2]).bits
    {'dot_general': 'int4', 'dot_general:1': 'int2'}
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if samples is None:
        samples = 1 if method == "local" else 2
    probe = Probe(
        fun,
        codecs,
        policy=policy,
        argnums=argnums,
        has_aux=has_aux,
        samples=operator.index(samples),
    )

    def local(*args: Any, **kwargs: Any) -> Sensitivities:
        layout = probe.layout(*args, **kwargs)
        key = jax.random.key(seed)
        statistics = probe.statistics(key, *args, **kwargs)
        return Sensitivities.from_statistics(layout, statistics)

    def measured(*args: Any, **kwargs: Any) -> Sensitivities:
        residuals = layouts.find(probe.trace(args, kwargs), probe.basis)
        layout = residuals.layout(probe.codecs)
        return exact.measure(probe.trace, residuals, layout, args, kwargs, samples, seed)

    return local if method == "local" else measured
