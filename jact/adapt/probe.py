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
from jact.adapt import cotangents
from jact.adapt import layout as layouts
from jact.adapt.table import Layout
from jact.adapt.taps import STORAGE, BiasTaps, RoundingAll, VarianceTaps, errs_independently
from jact.codecs import Cast, Codec, Quantize
from jact.codecs.offload import on_device
from jact.engine.compressed import pullback_of
from jact.engine.instrumented import Instrument, instrumented_gradient
from jact.engine.origins import Input
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
        pass_ = _Pass(traced, residuals, layout)
        num_consts = len(traced.closed.consts)

        @jax.custom_vjp
        def probed(key: Any, *values: Any) -> tuple[list[Any], dict[str, Any]]:
            del key
            outs = compat.call_jaxpr(traced.closed, values[:num_consts], values[num_consts:])
            unknown = jnp.full(layout.supported.shape, jnp.nan, jnp.float32)
            statistics = dict.fromkeys(("error", "bias", "independent"), unknown)
            return outs, statistics | {"gradient": jnp.float32(jnp.nan)}

        def probed_forward(key: Any, *values: Any) -> tuple[Any, Any]:
            outs, gradients, statistics = self._measure(pass_, key, values)
            return (outs, statistics), gradients

        def probed_backward(gradients: Any, cotangents: Any) -> tuple[Any, ...]:
            result: list[Any] = [None] * len(traced.values)
            for i, gradient in zip(pass_.moving, gradients, strict=True):
                result[i] = gradient * cotangents[0][0].astype(gradient.dtype)
            return (None, *result)

        probed.defvjp(probed_forward, probed_backward)
        return probed(key, *traced.values)

    def _measure(
        self, pass_: _Pass, key: Any, values: Sequence[Any], full: Any = None
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        layout = pass_.layout
        _reject_mapped(layout)
        sign_key, seed_key = jax.random.split(key)
        # Where the probe itself is mapped, each device measures its own gradient.
        row = compat.varying_like(jnp.zeros(len(layout.codecs), jnp.float32), values)
        rows = dict.fromkeys(layout.names, row)
        gradients, outs, pull = pass_.differentiate(VarianceTaps(layout), rows, values)
        independent = jnp.zeros(layout.supported.shape, jnp.float32)
        squared = _squared_norms(gradients)
        for k in jax.random.split(sign_key, self._samples):
            sums = _stack(layout, pull(cotangents.signs(k, gradients, squared)))
            independent += sums / self._samples
        error, bias = independent, jnp.zeros_like(independent)
        if self._bias:
            chosen = _with_bias(layout.codecs) if layout.names else []
            measured = self._biases(pass_, (values, gradients, seed_key), chosen, full)
            error, bias = _with_biases(layout.codecs, chosen, independent, measured)
        figures = {"error": error, "bias": bias, "independent": independent, "gradient": squared}
        return outs, gradients, figures

    def _biases(self, pass_: _Pass, operands: Any, codecs: list[int], full: Any) -> Any:
        """For each of some codecs, what `_bias_of` finds; zeros where `full` is there and false."""

        def measure(operands: Any) -> Any:
            values, exact, key = operands
            seeds = jax.random.bits(key, (len(codecs),), jnp.uint32)
            if len(codecs) == 1:  # The program of one that is known has nothing of the others.
                return self._bias_of(pass_, values, exact, codecs[0], seeds[0])[None]

            def of_codec(_: None, codec_and_seed: Any) -> tuple[None, Any]:
                return None, self._bias_of(pass_, values, exact, *codec_and_seed)

            return lax.scan(of_codec, None, (jnp.array(codecs, jnp.int32), seeds))[1]

        def skip(operands: Any) -> Any:
            shape = (len(codecs), len(pass_.layout.names), 3)
            return compat.varying_like(jnp.zeros(shape, jnp.float32), operands)

        if not codecs:
            return skip(operands)
        return measure(operands) if full is None else lax.cond(full, measure, skip, operands)

    def _bias_of(
        self, pass_: _Pass, values: Sequence[Any], exact: Sequence[Any], codec: Any, seed: Any
    ) -> Any:
        """For each residual, its part in the squared bias of the gradient; see `BiasTaps`."""
        layout = pass_.layout
        # One pass after the other: their forward passes are the same, and XLA would make one of
        # them, which keeps what all of them save.
        values, exact = compat.barrier((values, exact), ())[0]
        rounded = pass_.gradient(RoundingAll(layout, codec), seed, values)
        change = [a - b for a, b in zip(rounded, exact, strict=True)]
        values, change = compat.barrier((values, change), ())[0]
        row = compat.varying_like(jnp.zeros(3, jnp.float32), values)
        rows = dict.fromkeys(layout.names, row)
        # Other noise than that of the change: what they have in common is the bias.
        operands = (rows, seed + jnp.uint32(2))
        gradients, _, pull = pass_.differentiate(BiasTaps(layout, codec), operands, values)
        found, _ = pull(cotangents.late(change, _squared_norms(gradients), seed))
        return _stack(layout, found)

    def at(
        self, key: Any, traced: Traced, residuals: layouts.Residuals, layout: Layout, full: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """The gradient of a traced function at its own values, flat, and the statistics.

        Where `full`, a bool that may be traced, is false, biases are left out, and with them most
        of the time that a probe takes: "error" and "bias" mean nothing then.
        """
        pass_ = _Pass(traced, residuals, layout)
        _, gradients, statistics = self._measure(pass_, key, traced.values, full)
        return gradients, statistics

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


class _Pass:
    """The passes of one traced function, with instruments in them."""

    def __init__(self, traced: Traced, residuals: layouts.Residuals, layout: Layout):
        self.layout = layout
        self.moving = traced.wanted
        self._traced = traced
        self._plan = residuals.stored_with(STORAGE)
        min_bytes = residuals.plan.basis.min_bytes
        self._storage = Policy(default=STORAGE, min_bytes=min_bytes, derivatives=False)

    def gradient(self, instrument: Instrument, operands: Any, values: Sequence[Any]) -> list[Any]:
        """The gradient, as a flat list."""
        return instrumented_gradient(self._traced, self._plan, instrument, operands, values)[0]

    def differentiate(
        self, instrument: Instrument, operands: Any, values: Sequence[Any]
    ) -> tuple[list[Any], list[Any], Callable[[Sequence[Any]], Any]]:
        """The gradient, the results, and how the operands' cotangents follow from the gradient's.

        The backward pass through the backward pass reads codes, too.
        """
        leaves, tree = jax.tree.flatten(operands)
        num_operands = len(leaves)

        def flat(*args: Any) -> list[Any]:
            operands = jax.tree.unflatten(tree, args[:num_operands])
            gradients, outs = instrumented_gradient(
                self._traced, self._plan, instrument, operands, args[num_operands:]
            )
            return [*gradients, *outs]

        closed: Any = jax.make_jaxpr(flat)(*leaves, *values)
        inputs = [Input(f"constant[{i}]", wanted=False) for i in range(len(closed.consts))]
        inputs += [Input(f"operand[{i}]") for i in range(num_operands)]
        inputs += [Input(f"value[{i}]", wanted=False) for i in range(len(values))]
        results, pull = pullback_of(
            closed, [*closed.consts, *leaves, *values], inputs, len(self.moving), self._storage
        )

        def pull_operands(cotangents: Sequence[Any]) -> Any:
            first = len(closed.consts)
            return jax.tree.unflatten(tree, pull(cotangents)[first : first + num_operands])

        return results[: len(self.moving)], results[len(self.moving) :], pull_operands


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
        measured: `[chosen codec, residual, 3]`: see `BiasTaps`.

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


def _stack(layout: Layout, rows: Any) -> Any:
    if not layout.names:
        return jnp.zeros(layout.supported.shape, jnp.float32)
    return jnp.stack([rows[name] for name in layout.names])


def _squared_norms(xs: Sequence[Any]) -> Any:
    return sum((jnp.sum(jnp.square(jnp.abs(x)).astype(jnp.float32)) for x in xs), jnp.float32(0))
