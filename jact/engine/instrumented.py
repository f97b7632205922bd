"""A function whose passes can be looked into: what is saved, and what the gradient makes of it.

It is `compressed` for measurements. What an instrument adds reaches the bodies of loops and
branches, and the gradient can be differentiated with respect to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jact import compat
from jact.engine import backward, forward
from jact.engine.compressed import Prepared, Static, inputs_to_keep, prepare, seed_of
from jact.engine.directions import Directions
from jact.engine.origins import Input
from jact.engine.select import Saved
from jact.engine.trace import Traced
from jact.plan import Plan
from jact.policy import Policy


class Instrument(Protocol):
    """What a measurement does with the values that a function saves.

    Operands are a pytree of arrays that whoever calls the instrumented function passes in.
    """

    def replace(self, name: str, entry: Saved, value: Any, operands: Any) -> Any:
        """What is encoded in the place of a value, of the same type: itself, most often.

        Args:
            name: the value's full name, as in a plan.
            entry: the value, and how it is stored.
            value: the value itself.
            operands: see above.
        """
        ...

    def deviates(self, name: str) -> bool:
        """Whether `deviate` adds something to the value of that name."""
        ...

    def deviate(self, name: str, entry: Saved, code: Any, operands: Any) -> Any:
        """What is added to a value wherever the backward pass reads it.

        Args:
            name: the value's full name, as in a plan.
            entry: the value, and how it is stored.
            code: its code.
            operands: see above.
        """
        ...


def instrumented(
    closed: Any,
    inputs: Sequence[Input],
    num_differentiated_outputs: int,
    policy: Policy | Plan | Directions,
    name: str,
    scope: str = "",
    *,
    instrument: Instrument,
    operands: Any,
    around: str = "",
) -> Callable[..., list[Any]]:
    """The traced function with an instrument in its passes.

    Args:
        closed: see `compressed`; so are those that follow.
        inputs: what is known of the constants and inputs.
        num_differentiated_outputs: how many of the first results are not auxiliary.
        policy: how values are stored.
        name: the user's name of the function.
        scope: the name of the loop whose body it is, ending in a slash; empty if there is none.
        instrument: the instrument.
        operands: its operands.
        around: the names of the loops around that loop, ending in a slash.

    Returns:
        A function of the constants, followed by the inputs. Its gradient can be differentiated with
        respect to the operands, as far as the instrument's deviations depend on them.
    """
    num_consts = len(closed.consts)
    prefix = around + scope

    @jax.custom_vjp
    def run(operands: Any, *values: Any) -> list[Any]:
        del operands
        return compat.call_jaxpr(closed, values[:num_consts], values[num_consts:])

    def run_forward(operands: Any, *values: Any) -> tuple[list[Any], Any]:
        prepared = prepare_instrumented(
            closed, values, inputs, num_differentiated_outputs, policy, instrument, operands, prefix
        )

        def replace(entry: Saved, value: Any) -> Any:
            if entry.value.marks:  # It belongs to a body, which has replaced it.
                return value
            return instrument.replace(prefix + entry.name, entry, value, operands)

        outputs, codes = forward.run_forward(
            prepared.linearized,
            prepared.selection,
            values,
            [seed_of(entry.name) for entry in prepared.saved],
            scope,
            lax.stop_gradient,
            replace,
        )
        by_reference = {i: values[i] for i in inputs_to_keep(prepared, twice=False)}
        return outputs, (Static(prepared), by_reference, codes, operands)

    def run_backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        static, by_reference, codes, operands = residuals
        linearized, selection = static.prepared.linearized, static.prepared.selection
        deviations = {
            entry.var: functools.partial(
                instrument.deviate, prefix + entry.name, entry, code, operands
            )
            for entry, code in zip(selection.saved, codes, strict=True)
            if instrument.deviates(prefix + entry.name) and not entry.value.marks
        }
        cts = [cotangents[i] for i in linearized.cotangents]
        gradients = backward.run_backward(
            linearized, selection, by_reference, codes, cts, deviations
        )
        return (None, *static.prepared.by_input(gradients))

    run.defvjp(run_forward, run_backward)
    return functools.partial(run, operands)


def instrumented_gradient(
    traced: Traced,
    policy: Policy | Plan,
    instrument: Instrument,
    operands: Any,
    values: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """The gradient of a traced function's first result, with an instrument in its passes.

    Args:
        traced: the function; its first result is a scalar.
        policy: how values are stored.
        instrument: the instrument.
        operands: its operands.
        values: what to differentiate at, of the types of `traced.values`.

    Returns:
        One gradient for each of `traced.wanted`, and the function's results.
    """
    function = instrumented(
        traced.closed,
        traced.inputs,
        traced.num_differentiated_outputs,
        policy,
        traced.name,
        instrument=instrument,
        operands=operands,
    )
    wanted = traced.wanted

    def of_wanted(*chosen: Any) -> tuple[Any, list[Any]]:
        full = list(values)
        for i, x in zip(wanted, chosen, strict=True):
            full[i] = x
        outs = function(*full)
        return outs[0], outs

    value, pull, outs = jax.vjp(of_wanted, *(values[i] for i in wanted), has_aux=True)
    return list(pull(jnp.ones_like(value))), outs


def prepare_instrumented(
    closed: Any,
    values: Sequence[Any],
    inputs: Sequence[Input],
    num_differentiated_outputs: int,
    policy: Policy | Plan | Directions,
    instrument: Instrument,
    operands: Any,
    prefix: str = "",
) -> Prepared:
    """`prepare`, with an instrument in the bodies of loops and branches."""
    compress = functools.partial(
        instrumented, instrument=instrument, operands=operands, around=prefix
    )
    return prepare(closed, values, inputs, num_differentiated_outputs, policy, compress=compress)
