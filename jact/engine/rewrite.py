"""Operations that jact differentiates in its own way: control flow, softmax, window maxima."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.engine import control_flow, derivatives, softmax
from jact.engine.control_flow import CompressBody
from jact.engine.names import module_path, numbered
from jact.engine.origins import Input, Operands
from jact.engine.program import Equation, Program, Var


class Rewriter:
    """Applies the equations of one program, or what takes their place; the results are the same."""

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Input],
        compress_body: CompressBody,
        min_bytes: int = 0,
        singular_only: bool = True,
    ):
        """Goes through a program.

        Args:
            program: the program.
            inputs: what is known of the constants of its own and of its inputs.
            compress_body: see `CompressBody`.
            min_bytes: see `derivatives.find`.
            singular_only: see `derivatives.find`.
        """
        self._operands = Operands(program, inputs)
        self._compress_body = compress_body
        self._entered: Counter[str] = Counter()
        self._softmaxes = softmax.find(program.eqns)
        # The operands of equations that a later one is rewritten with, by their results.
        self._kept: dict[Var, Sequence[Any]] = {}
        for found in self._softmaxes.values():
            self._kept |= {v: () for v in (found.numerator, *(e.outvars[0] for e in found.sums))}
        self._activations = {
            v: activation
            for v, activation in derivatives.find(program, min_bytes, singular_only).items()
            if v not in self._kept
        }
        self._arguments: dict[Var, Any] = {a.argument: None for a in self._activations.values()}

    def bind(self, eqn: Equation, args: Sequence[Any]) -> list[Any]:
        """Applies an equation to its operands."""
        for atom, arg in zip(eqn.invars, args, strict=True):
            if compat.is_var(atom) and atom in self._arguments:
                self._arguments[atom] = arg
        if control_flow.can_enter(eqn):
            base = f"{module_path(eqn)}{eqn.primitive.name}"
            name = numbered(base, self._entered[base])
            self._entered[base] += 1
            return control_flow.enter(eqn, args, self._operands, self._compress_body, name)
        if eqn.primitive.name == "reduce_window_max" and _is_pooling(eqn):
            with compat.equation_context(eqn):
                return [_max_pool(eqn, args[0])]
        if (found := self._softmaxes.get(eqn.outvars[0]) if eqn.outvars else None) is not None:
            exponent = self._kept[found.numerator][0]
            with compat.equation_context(eqn):
                return [softmax.apply(eqn, found, exponent, args, self._kept)]
        if eqn.outvars and eqn.outvars[0] in self._kept:
            self._kept[eqn.outvars[0]] = args
        results = compat.bind_equation(eqn, args)
        if eqn.outvars and (activation := self._activations.get(eqn.outvars[0])) is not None:
            argument = self._arguments[activation.argument]
            with compat.equation_context(eqn):
                results = [derivatives.apply(activation, argument, results[0])]
        return results


def _is_pooling(eqn: Equation) -> bool:
    """Whether an equation is an ordinary maximum over small windows."""
    params = eqn.params
    return (
        all(d == 1 for d in params["base_dilation"])
        and math.prod(params["window_dimensions"]) <= 64
        and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
        and eqn.outvars[0].aval.size > 0
    )


def _max_pool(eqn: Equation, x: Any) -> Any:
    """Max-pooling that remembers which element of each window won.

    JAX's own gradient looks for the winners again, among values that would be decoded ones. Here
    the winner's position in its window is a residual of its own: four bits for each window of up to
    16 elements, exact.
    """

    @jax.custom_jvp
    def pool(x: Any) -> Any:
        (out,) = compat.bind_equation(eqn, [x])
        return out

    @pool.defjvp
    def pool_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        out = pool(*primals)
        winner = _winner(eqn, primals[0], out)
        zero = jnp.zeros((), out.dtype)
        tangent = jnp.zeros(out.shape, out.dtype)
        for k, part in enumerate(_window_slices(eqn, tangents[0], 0)):
            won = winner == jnp.asarray(k, winner.dtype)
            tangent += jnp.where(won, part, jnp.broadcast_to(zero, out.shape))
        return out, tangent

    return pool(x)


def _winner(eqn: Equation, x: Any, out: Any) -> Any:
    """The position, within each window, of its first greatest element."""
    count = math.prod(eqn.params["window_dimensions"])
    winner = jnp.zeros(out.shape, jnp.int32)
    # From the last to the first, so that of equal elements the first one stays, as in JAX's own
    # gradient.
    for k, part in reversed(list(enumerate(_window_slices(eqn, x, -jnp.inf)))):
        winner = jnp.where(part == out, jnp.int32(k), winner)
    return winner.astype(jnp.uint4 if count <= 16 else jnp.uint8)


def _window_slices(eqn: Equation, x: Any, padding_value: float) -> list[Any]:
    """For each position in a window, the elements that all windows have there."""
    params = eqn.params
    config = [(low, high, 0) for low, high in params["padding"]]
    padded = lax.pad(x, jnp.asarray(padding_value, x.dtype), config)
    out_shape = eqn.outvars[0].aval.shape
    slices = []
    for offset in itertools.product(*map(range, params["window_dimensions"])):
        start = [o * d for o, d in zip(offset, params["window_dilation"], strict=True)]
        strides = params["window_strides"]
        limit = [s + (n - 1) * t + 1 for s, n, t in zip(start, out_shape, strides, strict=True)]
        slices.append(lax.slice(padded, start, limit, strides))
    return slices
