"""Compressing a Flax model block by block, against differentiating its whole loss with jact.

It gives the compiled peak of the gradient of the whole loss, and of the wrapped blocks as a ratio
to it; the time that tracing takes, of the loss and of its gradient, with wrapped blocks, as a ratio
to plain JAX; the same for the gradient of the whole loss; and how many operations wrapping adds to
the compiled loss. The policies "off" and "remat" are left out.
"""

import argparse
import collections
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jact
import jact.memory
from benchmarks import output
from benchmarks.models import MODELS
from benchmarks.options import Case, positive

COLUMNS: output.Columns = {
    "MiB": output.mib("peak_loss_bytes"),
    "blocks": output.number("peak_ratio", ".3f"),
    "trace": output.number("trace_ratio", ".3f"),
    "gradient": output.number("trace_gradient_ratio", ".2f"),
    "of loss": output.number("trace_gradient_loss_ratio", ".2f"),
    "added": output.number("operations_added", "d"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    targets = ("cpu", *jact.memory.TARGETS)
    parser.add_argument("--target", choices=targets, default="cpu", help="device to compile for")
    parser.add_argument("--rounds", type=positive, default=15, help="how often each is traced")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case."""
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    target = None if chosen.target == "cpu" else chosen.target
    for policy in case.policies:
        if policy in ("off", "remat"):
            continue
        output.announce(f"compiling {case.model} with {policy} for {chosen.target}")
        wrap = functools.partial(jact.compress, policy=policy)
        plain = MODELS[case.model].task(**case.overrides)
        blocks = MODELS[case.model].task(**case.overrides, remat=wrap)
        arguments = plain.abstract()
        peaks = [
            jact.memory.peak(gradient, *arguments, target=target)
            for gradient in (
                jact.value_and_grad(plain.loss, has_aux=True, policy=policy),
                jax.value_and_grad(blocks.loss, has_aux=True),
            )
        ]
        functions = {
            "plain": plain.loss,
            "blocks": blocks.loss,
            "plain gradient": jax.value_and_grad(plain.loss, has_aux=True),
            "blocks gradient": jax.value_and_grad(blocks.loss, has_aux=True),
            "loss gradient": jact.value_and_grad(plain.loss, has_aux=True, policy=policy),
        }
        seconds = tracing_seconds(functions, arguments, chosen.rounds)
        added = operations(blocks.loss, *arguments)
        added.subtract(operations(plain.loss, *arguments))
        yield case.row(
            policy,
            chosen.target,
            peak_loss_bytes=peaks[0],
            peak_blocks_bytes=peaks[1],
            peak_ratio=peaks[1] / peaks[0],
            trace_seconds=seconds["plain"],
            trace_ratio=seconds["blocks"] / seconds["plain"],
            trace_gradient_ratio=seconds["blocks gradient"] / seconds["plain gradient"],
            trace_gradient_loss_ratio=seconds["loss gradient"] / seconds["plain gradient"],
            operations_added=sum(map(abs, added.values())),
        )


def tracing_seconds(
    functions: dict[str, Callable[..., Any]], arguments: Any, rounds: int
) -> dict[str, float]:
    """Returns the least processor time that tracing each function takes, round after round.

    The least of many is what the machine's other work disturbs least.
    """
    seconds = {name: float("inf") for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            # JAX keeps the traces of a function object that it has seen.
            fresh = functools.partial(lambda function, *args: function(*args), function)
            start = time.process_time()
            jax.make_jaxpr(fresh)(*arguments)
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def operations(function: Callable[..., Any], *arguments: Any) -> collections.Counter[str]:
    """Counts the operations of a compiled function by their names, on JAX's default backend."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return collections.Counter(re.findall(r" = \S+ ([\w-]+)\(", text))
