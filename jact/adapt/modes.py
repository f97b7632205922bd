"""What a function whose policy is a controller does while a training step is traced.

A controller traces the step in a mode, which it sets by `compat.trace_in`. In a `Fixed` one each
function follows the plan for its place in the step. In a `Probing` one it also measures, in its
backward pass, how far the gradient would err for each residual and codec, and marks the figures for
`hoist.collect`.
"""

from __future__ import annotations

import copy
import dataclasses
import os.path
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jact import compat
from jact.adapt import exact, hoist, layout
from jact.adapt.probe import Probe
from jact.adapt.sketch import sketch
from jact.adapt.table import Layout
from jact.codecs import Keep, Quantize
from jact.codecs.quantize import BITS
from jact.compressed_function import Compressed
from jact.engine.compressed import compressed
from jact.engine.linearize import is_differentiable
from jact.engine.names import scope_path
from jact.engine.origins import Input
from jact.engine.trace import Traced
from jact.plan import Plan
from jact.policy import Policy

#: Plans by the place of the function that each is for.
type Plans = tuple[tuple[str, Plan], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """Functions follow plans.

    Each is equal to itself alone, which JAX finds out faster at each step than it compares plans.

    Attributes:
        owner: whose functions; those of other controllers follow their own.
        plans: by place.
        default: for a place without a plan.
    """

    owner: object
    plans: Plans
    default: Policy | Plan


@dataclasses.dataclass(frozen=True, eq=False)
class Probing:
    """Functions measure.

    Attributes:
        owner: whose functions.
        basis: the policy that they follow meanwhile, and that chooses the residuals.
        probe: knows the candidates.
        method: how errors are estimated: "local" or "exact".
        seed: of random directions.
        layouts: the residuals of each function, by place; filled in by the trace.
        uniform: likewise, int64 `[residual, 8]`: the bytes of each with 1 to 8 bits.
        calls: how many times the step calls each; once in a loop counts once.
    """

    owner: object
    basis: Policy
    probe: Probe
    method: str
    seed: int
    layouts: dict[str, Layout] = dataclasses.field(default_factory=dict)
    uniform: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Comparing:
    """Functions follow plans, and compare their gradients with exact ones.

    Attributes:
        fixed: the plans.
    """

    fixed: Fixed

    @property
    def owner(self) -> object:
        """Whose functions."""
        return self.fixed.owner


def run_comparing(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Comparing
) -> Any:
    """Calls a function, and has its backward pass mark sketches of its gradient and the exact one.

    Sketches of several batches add up to those of the sum of their gradients.
    """
    traced = function.trace(args, kwargs)
    traced.specialise()
    place = place_of(traced)
    wanted = traced.wanted
    values = list(traced.values)

    def mark(cotangents: Sequence[Any], name: str, grads: Sequence[Any]) -> list[Any]:
        return hoist.emit(cotangents, place, {name: sketch(lax.stop_gradient(grads))})

    @jax.custom_vjp
    def coded(moving: list[Any]) -> list[Any]:
        return moving

    coded.defvjp(lambda moving: (moving, None), lambda _, cts: (mark(cts, "coded", cts),))
    for i, value in zip(wanted, coded([values[i] for i in wanted]), strict=True):
        values[i] = value

    @jax.custom_vjp
    def exact_too(outs: list[Any], values: list[Any]) -> list[Any]:
        del values
        return outs

    def backward(values: list[Any], cts: list[Any]) -> tuple[list[Any], list[None]]:
        num_consts = len(traced.closed.consts)

        def of_wanted(*chosen: Any) -> list[Any]:
            full = list(values)
            for i, x in zip(wanted, chosen, strict=True):
                full[i] = x
            return compat.call_jaxpr(traced.closed, full[:num_consts], full[num_consts:])

        _, pull = jax.vjp(of_wanted, *(values[i] for i in wanted))
        moving = [ct for ct in cts if is_differentiable(ct.dtype)]
        passed = iter(mark(moving, "exact", pull(cts)))
        return [next(passed) if is_differentiable(ct.dtype) else ct for ct in cts], [None] * len(
            values
        )

    exact_too.defvjp(lambda outs, values: (outs, values), backward)
    policy = dict(mode.fixed.plans).get(place, mode.fixed.default)
    run = compressed(
        traced.closed, traced.inputs, traced.num_differentiated_outputs, policy, traced.name
    )
    return traced.unflatten(exact_too(run(*values), traced.values))


@dataclasses.dataclass(frozen=True, eq=False)
class Listing:
    """Functions list what they save exactly.

    Attributes:
        owner: whose functions.
        basis: the policy that chooses the residuals.
        exact: bytes, name and reason of each; filled in by the trace.
    """

    owner: object
    basis: Policy
    exact: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)


def run_listing(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Listing
) -> Any:
    """Calls a function, and lists what it saves exactly."""
    prepared = function.under(mode.basis).analyse(args, kwargs)
    mode.exact.extend((s.stored_bytes, s.name, s.exact) for s in prepared.saved if s.exact)
    return function.__wrapped__(*args, **kwargs)


def place_of(traced: Traced) -> str:
    """Identifies a function's place in the step: the modules around it, its name and its inputs.

    It does not depend on batch sizes, nor on the mode.
    """
    scopes = [scope_path(compat.name_scopes(eqn.source_info)) for eqn in traced.closed.jaxpr.eqns]
    # Of "Net/Block_0/Dense_0/" and "Net/Block_0/" that is "Net/Block_0/".
    common = os.path.commonprefix([scope.split("/")[:-1] for scope in scopes]) if scopes else []
    around = scope_path(compat.current_scopes()) + "".join(f"{part}/" for part in common)
    inputs = []
    for spec, value in zip(traced.inputs, traced.values, strict=True):
        aval = compat.type_of(value)
        weights = spec.wanted and not spec.encoded
        size = aval.shape if weights else len(aval.shape)
        inputs.append((str(aval.dtype), size, spec.encoded))
    return f"{around}{traced.name}@{zlib.crc32(repr(inputs).encode()):08x}"


def run_fixed(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Fixed
) -> Any:
    """Calls a function under the plan for its place."""
    traced = function.trace(args, kwargs)
    traced.specialise()
    policy = dict(mode.plans).get(place_of(traced), mode.default)
    return function.under(policy).run_traced(traced)


def run_probing(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Probing
) -> Any:
    """Calls a function, and has its backward pass mark the figures that a controller wants."""
    traced = function.trace(args, kwargs)
    traced.specialise()
    run = compressed(
        traced.closed,
        traced.inputs,
        traced.num_differentiated_outputs,
        mode.basis,
        traced.name,
        weights=traced.weights,
    )
    outs = run(*traced.values)
    moving = [
        i
        for i in range(traced.num_differentiated_outputs)
        if is_differentiable(compat.type_of(outs[i]).dtype)
    ]
    tap = _tap(traced, moving, place_of(traced), mode)
    tapped = tap([outs[i] for i in moving], traced.values)
    for i, out in zip(moving, tapped, strict=True):
        outs[i] = out
    return traced.unflatten(outs)


def _tap(traced: Traced, moving: Sequence[int], place: str, mode: Probing) -> Any:
    """An identity whose backward pass measures what the cotangents that pass through it lead to."""

    @jax.custom_vjp
    def tap(outs: list[Any], values: list[Any]) -> list[Any]:
        del values
        return outs

    def tap_forward(outs: list[Any], values: list[Any]) -> tuple[list[Any], list[Any]]:
        return outs, values

    def tap_backward(values: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[None]]:
        still = lax.stop_gradient((values, cotangents))
        figures = _measure(traced, moving, *still, place, mode)
        return hoist.emit(cotangents, place, figures), [None] * len(values)

    tap.defvjp(tap_forward, tap_backward)
    return tap


def _measure(
    traced: Traced,
    moving: Sequence[int],
    values: Sequence[Any],
    cotangents: Sequence[Any],
    place: str,
    mode: Probing,
) -> dict[str, Any]:
    """The figures of one backward pass; they add up over several."""
    target = _loss(traced, moving, values, cotangents, mode.basis)
    residuals = layout.find(target, mode.basis)
    table = residuals.layout(mode.probe.codecs)
    mode.layouts[place] = table
    mode.uniform[place] = residuals.layout([Keep(), *(Quantize(bits=b) for b in BITS)]).nbytes[
        :, 1:
    ]
    key = _key(values, place, mode.seed)
    if mode.method == "exact":
        grads, statistics = exact.at(key, target, residuals, table)
    else:
        grads, statistics = mode.probe.at(key, target, residuals, table, hoist.flag())
    sketched = sketch(grads)
    return {
        **statistics,
        "count": jnp.ones(()),
        "sketch": sketched,
        "sketch_squared": jnp.sum(sketched**2),
    }


def _loss(
    traced: Traced,
    moving: Sequence[int],
    values: Sequence[Any],
    cotangents: Sequence[Any],
    basis: Policy,
) -> Traced:
    """The function as one of a single result, the sum of its results times their cotangents.

    So its gradient is what the step makes of the function, scaled losses included. A part of a
    model also hands gradients on, to activations; what their errors do to parameters further on,
    it does not know. They are weighted as if their relative error were that of the parameters'
    gradients there: so that both groups of gradients have the same norm.
    """
    handed_on = [i for i, spec in enumerate(traced.inputs) if spec.encoded and spec.wanted]
    num_consts = len(traced.closed.consts)

    def product(weight: Any, cts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        full = list(values)
        for i in handed_on:
            full[i] = _weighted(full[i], weight)
        outs = compat.call_jaxpr(traced.closed, full[:num_consts], full[num_consts:])
        products = [
            jnp.sum(outs[i].astype(jnp.float32) * ct.astype(jnp.float32))
            for i, ct in zip(moving, cts, strict=True)
        ]
        return [sum(products, jnp.zeros(()))]

    def loss(weight: Any, *rest: Any) -> list[Any]:
        return product(weight, rest[: len(cotangents)], rest[len(cotangents) :])

    result = copy.copy(traced)
    result.values = [jnp.ones(()), *cotangents, *values]
    result.closed = jax.make_jaxpr(loss)(*map(compat.type_of, result.values))
    names = ["weight", *(f"cotangent {i}" for i in moving)]
    result.inputs = [Input(name, wanted=False) for name in names] + list(traced.inputs)
    result.num_differentiated_outputs = 1
    if handed_on:
        own, others = _norms(result, basis)
        result.values[0] = jnp.where((own > 0) & (others > 0), own / others, jnp.ones(()))
    return result


@jax.custom_vjp
def _weighted(x: Any, weight: Any) -> Any:
    """An identity that multiplies the cotangent by a weight."""
    del weight
    return x


_weighted.defvjp(
    lambda x, weight: (x, weight),
    lambda weight, ct: (ct * weight.astype(ct.dtype), jnp.zeros_like(weight)),
)


def _norms(traced: Traced, basis: Policy) -> tuple[Any, Any]:
    """The norms of the gradients to what is kept by reference, and to what is encoded."""
    run = compressed(traced.closed, traced.inputs, 1, basis, traced.name)
    at = traced.wanted

    def of_moving(*chosen: Any) -> Any:
        full = list(traced.values)
        for i, x in zip(at, chosen, strict=True):
            full[i] = x
        return run(*full)[0]

    grads = jax.grad(of_moving, tuple(range(len(at))))(*(traced.values[i] for i in at))
    squares = {False: jnp.zeros(()), True: jnp.zeros(())}
    for i, grad in zip(at, grads, strict=True):
        squares[traced.inputs[i].encoded] += jnp.sum(jnp.square(jnp.abs(grad)).astype(jnp.float32))
    return jnp.sqrt(squares[False]), jnp.sqrt(squares[True])


def _key(values: Sequence[Any], place: str, seed: int) -> jax.Array:
    """A key that differs from batch to batch, but is the same when a run is repeated or resumed."""
    bits = jnp.uint32(zlib.crc32(place.encode()) ^ seed)
    for value in values:
        if is_differentiable(value.dtype):
            total = jnp.sum(jnp.abs(value).astype(jnp.float32))
            bits = bits * jnp.uint32(0x9E3779B1) + lax.bitcast_convert_type(total, jnp.uint32)
    return jax.random.key(bits)
