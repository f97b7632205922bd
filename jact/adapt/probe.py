"""Local sensitivities: the derivative of a random projection of the gradient.

The backward pass makes the gradient g of what was saved: g(r). Rounding adds independent errors of
known variance v to the elements of r, so the gradient's expected squared error is, to first order,
the sum of v |dg/dr|^2. For a vector z of random signs, |dg/dr|^2 is the expectation of the squared
derivative of <z, g(r)>, which one further reverse pass gives for every element of every residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.adapt import layout as layouts
from jact.adapt.passes import Passes, squared_norm
from jact.adapt.table import Layout
from jact.adapt.taps import BIAS, Turn, errs_independently
from jact.codecs import Cast, Codec, Quantize
from jact.codecs.offload import on_device
from jact.engine.trace import Traced, split_arrays
from jact.plan import Plan, PolicyLike
from jact.policy import Policy
from jact.transform import as_compressed

#: What the bias is at least, as a share of what it would be if the errors of the elements of a
#: residual were independent: its estimate is noisy, and may come out below zero.
_LEAST_BIAS = 0.1


class Probe:
    """One instrumented forward and backward pass: value, gradient, and statistics of them.

    A probe is traceable: it works under `jit`, inside of `lax.scan` (over micro-batches, say) and
    under any sharding. It neither reads nor writes anything but its arguments.

    Attributes:
        codecs: the candidates, `Keep()` first.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        codecs: Sequence[Codec | str],
        *,
        policy: PolicyLike = "int4",
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        samples: int = 1,
        bias: bool = True,
    ):
        """Takes a function to differentiate.

        Args:
            fun: as for `jact.value_and_grad`; or the result of `jact.grad` or
                `jact.value_and_grad`, which bring their own policy and arguments to differentiate.
            codecs: the candidates; `Keep()` comes to them if it is not among them.
            policy: chooses the residuals: a policy, or a plan, whose basis chooses.
            argnums: as for `jact.value_and_grad`.
            has_aux: as for `jact.value_and_grad`.
            samples: how many random directions the statistics are averaged over.
            bias: whether biases are estimated: of codecs whose errors are not independent
                (averages; rounding to the nearest below 4 bits), and of nonlinear functions that
                are made again from values that were rounded at random, if a codec does so to 3 bits
                or fewer. It takes two gradients and a further backward pass for each of those
                codecs, and for one that rounds at random.

        Raises:
            TypeError: when `codecs` or `policy` is of the wrong type.
            ValueError: for an unknown codec or policy, or for `samples` below 1.
        """
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        self.codecs = layouts.candidates(codecs)
        self._function = as_compressed(fun, policy, argnums, has_aux)
        self._argnums = self._function._differentiated
        if not self._argnums:
            raise TypeError(
                "fun must be a function to differentiate, or the result of jact.grad or "
                f"jact.value_and_grad, got {fun!r}"
            )
        if self._function.policy is None:
            raise ValueError('policy "off" encodes nothing: there is nothing to measure')
        # As with JAX, the gradient with respect to one argument is no tuple.
        if len(self._argnums) == 1 and not isinstance(argnums, Sequence):
            (self._argnums,) = self._argnums
        self._samples = samples
        self._bias = bias

    def layout(self, *args: Any, **kwargs: Any) -> Layout:
        """The residuals at some arguments, arrays or types; nothing is run."""
        return layouts.find(self.trace(args, kwargs), self.basis).layout(self.codecs)

    @property
    def basis(self) -> Policy:
        """The policy that chooses the residuals."""
        policy = self._function.basis
        return policy.basis if isinstance(policy, Plan) else policy

    def __call__(
        self, key: jax.Array, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """The value, the gradient, and the statistics.

        Args:
            key: a typed key for the random directions; may be traced.
            *args: the arguments of the function.
            **kwargs: its keyword arguments.

        Returns:
            The value, or the pair of value and auxiliary data; the gradient, in form that of
            `jact.value_and_grad`, computed from residuals of 8 bits; and a flat dictionary of
            float32 arrays, for `Sensitivities.from_statistics`: "error", "bias" and "independent"
            `[residual, codec]`, the last being the error if those of a residual's elements were
            independent of each other; and "gradient" `[]`.
        """
        function = self._function

        def probed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            traced = self.trace(args, kwargs)
            outs, statistics = self.measure(key, traced)
            out = traced.unflatten(outs)
            value, aux = out if function._has_aux else (out, None)
            return value, (aux, statistics)

        differentiate = jax.value_and_grad(probed, self._argnums, has_aux=True, allow_int=True)
        (value, (aux, statistics)), gradient = differentiate(*args, **kwargs)
        return ((value, aux) if function._has_aux else value), gradient, statistics

    def measure(self, key: Any, traced: Traced) -> tuple[list[Any], dict[str, Any]]:
        """The results of a traced function, and the statistics of its gradient.

        To be called, as a compressed function is, where the results are being differentiated: the
        statistics are NaN without. The gradient is the probe's.

        Args:
            key: a typed key.
            traced: the function; its first result is a scalar, and the only one with a cotangent.

        Returns:
            The results, flat, and the statistics.
        """
        residuals = layouts.find(traced, self.basis)
        layout = residuals.layout(self.codecs)
        passes = Passes(traced, residuals, layout)
        num_consts = len(traced.closed.consts)

        @jax.custom_vjp
        def probed(key: Any, *values: Any) -> tuple[list[Any], dict[str, Any]]:
            del key
            outs = compat.call_jaxpr(traced.closed, values[:num_consts], values[num_consts:])
            unknown = jnp.full(layout.supported.shape, jnp.nan, jnp.float32)
            statistics = dict.fromkeys(("error", "bias", "independent"), unknown)
            return outs, statistics | {"gradient": jnp.float32(jnp.nan)}

        def probed_forward(key: Any, *values: Any) -> tuple[Any, Any]:
            gradients, statistics = self._measure(passes, key, values)
            outs = compat.call_jaxpr(traced.closed, values[:num_consts], values[num_consts:])
            return (outs, statistics), gradients

        def probed_backward(gradients: Any, cotangents: Any) -> tuple[Any, ...]:
            result: list[Any] = [None] * len(traced.values)
            for i, gradient in zip(passes.moving, gradients, strict=True):
                result[i] = gradient * cotangents[0][0].astype(gradient.dtype)
            return (None, *result)

        probed.defvjp(probed_forward, probed_backward)
        return probed(key, *traced.values)

    def _measure(
        self, passes: Passes, key: Any, values: Sequence[Any], full: Any = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """The gradient, flat, and the statistics; without biases where `full` is false."""
        layout = passes.layout
        _reject_mapped(layout)
        sign_key, seed_key = jax.random.split(key)
        chosen = _with_bias(layout.codecs) if self._bias and layout.names else []
        if not chosen and self._samples == 1:
            gradients, rows = passes.variances(sign_key, values)
            rows = rows[None]
        else:
            gradients, rows = self._turns(passes, sign_key, seed_key, values, chosen, full)
        independent = rows[: self._samples, :, : len(layout.codecs)].mean(0)
        error, bias = independent, jnp.zeros_like(independent)
        if self._bias:
            # Every second turn after those of the variances.
            measured = rows[self._samples + 1 :: 2, :, len(layout.codecs) :]
            error, bias = _with_biases(layout.codecs, chosen, independent, measured)
        figures = {"error": error, "bias": bias, "independent": independent}
        return gradients, figures | {"gradient": squared_norm(gradients)}

    def _turns(
        self,
        passes: Passes,
        sign_key: Any,
        seed_key: Any,
        values: Sequence[Any],
        chosen: Sequence[int],
        full: Any,
    ) -> tuple[list[Any], Any]:
        """The gradient, and of each turn the statistics, one turn after the other.

        There is one for each sample of the variances. For each codec with a bias there are two: the
        change of the gradient where all residuals are stored by it, and what each adds to that.
        They are iterations of one loop, as a program with all of them takes long to compile.
        """
        samples, biased = self._samples, len(chosen)
        seeds = jnp.repeat(jax.random.bits(seed_key, (biased,), jnp.uint32), 2)
        # Other noise than that of the change: what they have in common is the bias.
        seeds += jnp.tile(jnp.array([0, 2], jnp.uint32), biased)
        turns = Turn(
            jnp.array([0.0] * samples + [1.0, 0.5] * biased, jnp.float32),
            jnp.array([0] * samples + [c for c in chosen for _ in range(2)], jnp.int32),
            jnp.concatenate([jnp.zeros(samples, jnp.uint32), seeds]),
        )
        keys = jax.random.split(sign_key, samples)
        shape = (samples + 2 * biased, len(passes.layout.names), len(passes.layout.codecs) + BIAS)
        rows = compat.varying_like(jnp.zeros(shape, jnp.float32), values)
        moving = [values[i] for i in passes.moving]
        nothing = [compat.varying_like(jnp.zeros_like(x), x) for x in moving]
        only = chosen[0] if biased == 1 else None

        def take(i: Any, state: Any) -> Any:
            exact, change, rows = state
            turn = Turn(*(x[i] for x in turns))
            of_variance = turn.share == 0
            sign_key = keys[jnp.minimum(i, samples - 1)]
            gradients, found = passes.turn(turn, only, sign_key, change, values)
            exact = _where(of_variance, gradients, exact)
            change = [a - b for a, b in zip(gradients, exact, strict=True)]
            return exact, change, rows.at[i].set(found)

        number = shape[0] if full is None else jnp.where(full, shape[0], samples)
        exact, _, rows = lax.fori_loop(0, number, take, (nothing, nothing, rows))
        return exact, rows

    def at(
        self, key: Any, traced: Traced, residuals: layouts.Residuals, layout: Layout, full: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """The gradient of a traced function at its own values, flat, and the statistics.

        Where `full`, a bool that may be traced, is false, biases are left out, and with them most
        of the time that a probe takes: "error" and "bias" mean nothing then.
        """
        return self._measure(Passes(traced, residuals, layout), key, traced.values, full)

    def statistics(self, key: jax.Array, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """The statistics alone, compiled and run; arguments that are no arrays are static."""
        arrays, call = split_arrays(args, kwargs)

        @jax.jit
        def run(key: jax.Array, arrays: Any) -> dict[str, jax.Array]:
            args, kwargs = call(arrays)
            return self(key, *args, **kwargs)[2]

        return run(key, arrays)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The function, traced at some arguments."""
        return self._function.trace(args, kwargs)


def _with_bias(codecs: Sequence[Codec]) -> list[int]:
    """The positions of codecs whose bias is to be measured.

    Of those that round at random one stands for all, as nonlinear functions of a decoded value are
    biased by its variance: that of the fewest bits, whose bias stands out from the noise most. It
    has to have three or fewer; and two, if it can, as at one bit errors are as large as values.
    """
    random = [codec.bits for codec in map(on_device, codecs) if _is_random_quantizer(codec)]
    measured = min([bits for bits in random if bits > 1] or random, default=8)
    return [
        i
        for i, codec in enumerate(map(on_device, codecs))
        if not errs_independently(codec)
        or (measured <= 3 and _is_random_quantizer(codec) and codec.bits == measured)
    ]


def _is_random_quantizer(codec: Codec) -> TypeGuard[Quantize]:
    return isinstance(codec, Quantize) and codec.stochastic and not codec.zero_edge


def _is_deterministic(codec: Codec) -> bool:
    codec = on_device(codec)
    return isinstance(codec, Cast) or (isinstance(codec, Quantize) and not codec.stochastic)


def _with_biases(
    codecs: Sequence[Codec], chosen: Sequence[int], error: Any, measured: Any
) -> tuple[Any, Any]:
    """The errors and biases, from the errors as if those of all elements were independent.

    Args:
        codecs: the candidates.
        chosen: the positions of those whose bias was measured.
        error: `[residual, codec]`.
        measured: `[chosen codec, residual, 3]`: see `Taps`.

    Returns:
        The expected squared errors and the squared biases, `[residual, codec]`.
    """
    independent = error
    # What is rounded the same way every time is all bias.
    deterministic = jnp.array([[_is_deterministic(codec) for codec in codecs]])
    bias = jnp.where(deterministic, error, jnp.zeros_like(error))
    for i, (moved, random, total) in zip(chosen, jnp.moveaxis(measured, -1, 1), strict=True):
        if errs_independently(codecs[i]):
            # The bias is that of curvature, proportional to the variance.
            curvature = jnp.maximum(moved, 0)
            for j, codec in enumerate(map(on_device, codecs)):
                if _is_random_quantizer(codec):
                    share = _ratio(independent[:, j], independent[:, i])
                    bias = bias.at[:, j].set(curvature * jnp.square(share))
                    error = error.at[:, j].set(independent[:, j] + bias[:, j])
        else:
            share = _ratio(random, total)
            least = _LEAST_BIAS * (1 - share) * independent[:, i]
            bias = bias.at[:, i].set(jnp.maximum(moved, least))
            error = error.at[:, i].set(share * independent[:, i] + bias[:, i])
    return error, bias


def _ratio(a: Any, b: Any) -> Any:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, jnp.ones_like(b)), jnp.zeros_like(a))


def _reject_mapped(layout: Layout) -> None:
    """Taps don't reach into what a function maps over devices: no derivative would be caught."""
    inside = [n for n in layout.names if any("shard_map" in part for part in n.split("/")[:-1])]
    if inside:
        raise NotImplementedError(
            f"the local method does not reach into shard_map, where {', '.join(inside)} are "
            'saved; use the exact one: jact.sensitivity(..., method="exact"), or '
            'jact.Controller(..., sensitivity="exact")'
        )


def _where(condition: Any, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    return [jnp.where(condition, x, y) for x, y in zip(xs, ys, strict=True)]
