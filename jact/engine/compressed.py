"""A flat function whose backward pass reads codes, tied together by `jax.custom_vjp`."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.engine import backward, forward
from jact.engine.directions import Directions
from jact.engine.linearize import Linearized, as_function, is_differentiable, linearize
from jact.engine.origins import Input
from jact.engine.program import Bind, Program
from jact.engine.rewrite import Rewriter
from jact.engine.select import Saved, Selection, select
from jact.plan import Plan
from jact.policy import Policy

# Part of the key under which JAX keeps the traces of nested `jax.jit` functions.
_uncompressed = jax.make_user_context(False)


def uncompressed() -> AbstractContextManager[None]:
    """A context in which compressed functions are called as if they were not."""
    return _uncompressed(True)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A function that was traced and analysed: everything that is known before it runs.

    Attributes:
        linearized: its forward and backward programs.
        inputs: what is known of its inputs.
        selection: what is saved of it.
    """

    linearized: Linearized
    inputs: tuple[Input, ...]
    selection: Selection

    @property
    def saved(self) -> tuple[Saved, ...]:
        """What is saved, in the order in which the forward pass makes it."""
        return self.selection.saved

    def by_input(self, gradients: Sequence[Any]) -> list[Any]:
        """What the backward pass makes, one gradient for each input: None where it has none."""
        result: list[Any] = [None] * len(self.inputs)
        for i, gradient in zip(self.linearized.differentiated, gradients, strict=True):
            result[i] = gradient
        return result


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Carries static information from the forward to the backward rule, next to the arrays."""

    prepared: Prepared


def prepare(
    closed: Any,
    values: Sequence[Any],
    inputs: Sequence[Input],
    num_differentiated_outputs: int,
    policy: Policy | Plan | Directions,
    rewritten: bool = True,
    compress: Callable[..., Callable[..., list[Any]]] | None = None,
) -> Prepared:
    """Linearises a traced function and chooses what to save.

    Args:
        closed: the traced function; its constants count as its first inputs.
        values: arrays or types of all inputs.
        inputs: what is known of them.
        num_differentiated_outputs: how many of the first results are not auxiliary.
        policy: how values are stored; `Directions` where the function is a body inside of another.
        rewritten: whether `Rewriter` has its way, or the linearisation is JAX's own.
        compress: what compresses the bodies of loops and branches, `compressed` when None; called
            like that.

    Returns:
        What the forward and the backward pass need to know.

    Raises:
        ValueError: when a plan was made for another function; names what differs.
    """
    directions = policy if isinstance(policy, Directions) else Directions(policy)

    def compress_body(body: Any, body_inputs: Sequence[Input], name: str) -> Callable[..., Any]:
        scope = f"{name}/"
        body = compat.as_closed(body)
        constants = [Input(f"constant[{i}]", wanted=False) for i in range(len(body.consts))]
        outs = len(body.jaxpr.outvars)
        make = compress or compressed
        run = make(body, [*constants, *body_inputs], outs, directions.within(scope), name, scope)
        return functools.partial(run, *body.consts)

    basis = directions.basis
    singular_only = True not in basis.derivative_choices
    if rewritten:

        def rewriter(program: Program) -> Bind:
            return Rewriter(program, inputs, compress_body, basis.min_bytes, singular_only).bind

        function = as_function(closed, rewriter)
    else:
        function = as_function(closed)
    wanted = [spec.wanted for spec in inputs]
    linearized = linearize(function, values, wanted, num_differentiated_outputs)
    prepared = Prepared(linearized, tuple(inputs), select(linearized, inputs, directions))
    if directions is not policy:
        directions.warn_of_unused_rules()
        known: set[str] = set()
        if directions.unknown():
            # Of a small activation JAX saves other values than jact of a large one.
            larger = Directions(dataclasses.replace(basis, min_bytes=0))
            prepare(closed, values, inputs, num_differentiated_outputs, larger, rewritten)
            known = larger.found.names
        directions.check(known)
    return prepared


def compressed(
    closed: Any,
    inputs: Sequence[Input],
    num_differentiated_outputs: int,
    policy: Policy | Plan | Directions,
    name: str,
    scope: str = "",
    weights: Sequence[int] = (),
) -> Callable[..., list[Any]]:
    """The traced function with a backward pass that reads codes.

    Args:
        closed: the traced function.
        inputs: what is known of its constants and inputs.
        num_differentiated_outputs: how many of the first results are not auxiliary.
        policy: how values are stored; `Directions` where the function is a body inside of another.
        name: the user's name of the function, for messages.
        scope: the name of the loop whose body it is, ending in a slash; empty if there is none.
        weights: positions of inputs, kept by reference, that are being differentiated; see
            `_settle`.

    Returns:
        A function of the constants, followed by the inputs.
    """
    num_consts = len(closed.consts)

    def plain(*values: Any) -> list[Any]:
        return compat.call_jaxpr(closed, values[:num_consts], values[num_consts:])

    if _uncompressed.value:
        return plain

    def run_forward(*values: Any) -> tuple[list[Any], Any]:
        prepared = prepare(closed, values, inputs, num_differentiated_outputs, policy)
        seeds = [seed_of(entry.name) for entry in prepared.saved]
        # The function around a body has second derivatives of its own, which need no body's.
        twice = not scope and _twice_differentiable(prepared)
        detach = lax.stop_gradient if scope or twice else _only_once(name)
        outputs, codes = forward.run_forward(
            prepared.linearized, prepared.selection, values, seeds, scope, detach
        )
        by_reference = {i: values[i] for i in inputs_to_keep(prepared, twice)}
        return outputs, (Static(prepared), by_reference, codes)

    def run_backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        static, by_reference, codes = residuals
        linearized = static.prepared.linearized
        cts = [cotangents[i] for i in linearized.cotangents]
        gradients = _pullback(static.prepared, plain, name)(by_reference, codes, cts)
        return tuple(_settle(static.prepared.by_input(gradients), inputs, weights))

    return compat.custom_vjp(plain, run_forward, run_backward, name)


def pullback_of(
    closed: Any,
    values: Sequence[Any],
    inputs: Sequence[Input],
    num_differentiated_outputs: int,
    policy: Policy | Plan,
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The results of a traced function, and what makes gradients of their cotangents from codes.

    It is what `jax.vjp` makes of `compressed`, but its cotangents may be `backward.Late`.

    Args:
        closed: the traced function.
        values: its constants and inputs.
        inputs: what is known of them.
        num_differentiated_outputs: how many of the first results are not auxiliary.
        policy: how values are stored.

    Returns:
        The results; and a function of one cotangent for each of the first results, which gives one
        gradient for each input, None where it has none.
    """
    prepared = prepare(closed, values, inputs, num_differentiated_outputs, policy)
    linearized, seeds = prepared.linearized, [seed_of(entry.name) for entry in prepared.saved]
    outputs, codes = forward.run_forward(linearized, prepared.selection, values, seeds)
    by_reference = {i: values[i] for i in inputs_to_keep(prepared, twice=False)}

    def pull(cotangents: Sequence[Any]) -> list[Any]:
        cts = [cotangents[i] for i in linearized.cotangents]
        return prepared.by_input(
            backward.run_backward(linearized, prepared.selection, by_reference, codes, cts)
        )

    return outputs, pull


def _settle(gradients: Sequence[Any], inputs: Sequence[Input], weights: Sequence[int]) -> list[Any]:
    """Has the gradients of activations wait for those of weights.

    So the backward pass of the layer before this one does not begin before this one's has ended:
    XLA would rather compute the gradients of weights last, and keep their operands until then.
    """
    result = list(gradients)
    moving = [i for i, spec in enumerate(inputs) if spec.encoded and result[i] is not None]
    ready = [i for i in weights if result[i] is not None]
    if moving and ready:
        settled = compat.barrier([result[i] for i in moving], [result[i] for i in ready])
        for i, gradient in zip([*moving, *ready], [*settled[0], *settled[1]], strict=True):
            result[i] = gradient
    return result


def inputs_to_keep(prepared: Prepared, twice: bool) -> list[int]:
    """The inputs that are kept by reference.

    A second differentiation needs all that the residuals depend on. Where an input is encoded, or
    may have been overwritten, there can be none, and only what the first one needs is kept.
    """
    if not twice:
        return backward.inputs_read(prepared.linearized, prepared.saved)
    read = backward.inputs_read(prepared.linearized, ())
    types = [v.aval for v in prepared.linearized.forward.invars]
    return sorted({*read, *(i for i, t in enumerate(types) if not is_differentiable(t.dtype))})


def _twice_differentiable(prepared: Prepared) -> bool:
    types = (v.aval for v in prepared.linearized.forward.invars)
    refs = any(map(compat.is_ref, types)) or _makes_references(prepared.linearized.backward)
    return not refs and not any(spec.encoded for spec in prepared.inputs)


def _makes_references(program: Program) -> bool:
    return any(compat.is_ref(v.aval) for eqn in program.eqns for v in eqn.outvars)


def _pullback(
    prepared: Prepared, plain: Callable[..., list[Any]], name: str
) -> Callable[..., list[Any]]:
    """The backward pass as a function that can itself be differentiated, exactly.

    Codes are integers, and no derivative passes through them. The derivative of the gradient is
    therefore that of the plain gradient, computed from the inputs.
    """
    linearized = prepared.linearized
    types = [v.aval for v in linearized.forward.invars]

    def exact(by_reference: Any, cotangents: Any) -> list[Any]:
        # The gradient does not depend on the inputs that were not kept.
        values = [by_reference[i] if i in by_reference else _zeros(t) for i, t in enumerate(types)]

        def of_differentiated(*moving: Any) -> list[Any]:
            full = list(values)
            for i, x in zip(linearized.differentiated, moving, strict=True):
                full[i] = x
            outs = plain(*full)
            return [outs[i] for i in linearized.cotangents]

        _, pull = jax.vjp(of_differentiated, *(values[i] for i in linearized.differentiated))
        return list(pull(list(cotangents)))

    def pullback(by_reference: Any, codes: Any, cotangents: Any) -> list[Any]:
        return backward.run_backward(
            linearized, prepared.selection, by_reference, codes, cotangents
        )

    # JAX cannot compile a custom derivative of what makes references.
    if _makes_references(linearized.backward):
        return pullback
    differentiable = jax.custom_jvp(pullback)

    @differentiable.defjvp
    def pullback_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        by_reference, codes, cotangents = primals
        if not _twice_differentiable(prepared):
            raise _differentiated_twice(name)

        _, out_tangents = jax.jvp(exact, (by_reference, cotangents), (tangents[0], tangents[2]))
        return differentiable(by_reference, codes, cotangents), out_tangents

    return differentiable


def _only_once(name: str) -> Callable[[Any], Any]:
    """An identity that raises where the derivative of a gradient would be lost in a code."""

    @jax.custom_jvp
    def detach(x: Any) -> Any:
        return x

    @detach.defjvp
    def detach_jvp(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise _differentiated_twice(name)

    return detach


def _differentiated_twice(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"jact.compress({name}) encodes an argument, or uses a reference, so its "
        "gradient cannot be differentiated again. For second derivatives keep every argument by "
        'reference (keep=...), use jact.grad on the whole function, or policy="off".'
    )


def _zeros(like: Any) -> Any:
    return jnp.zeros(like.shape, like.dtype)


def seed_of(name: str) -> int:
    """The static part of a residual's rounding noise: stable, and different for every name."""
    return zlib.crc32(name.encode())
