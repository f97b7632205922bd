"""Compiled peak memory of one gradient, and what it saves for the backward pass.

Nothing is run and nothing is allocated: the peak is XLA's own plan of the temporary buffers. With a
target other than the CPU, the compiler of JAX's plugin is needed, but no device.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex

import jact
import jact.memory
from benchmarks import options, output
from benchmarks.options import REMAT, Case, use_cpu

COLUMNS: output.Columns = {
    "peak MiB": output.mib("peak_bytes"),
    "/ off": output.number("peak_ratio", ".3f"),
    "saved MiB": output.mib("saved_bytes"),
    "compile s": output.number("compile_seconds", ".1f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    options.add_target(parser)


def measure(case: Case, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a result for each policy of the case."""
    use_cpu()
    target = None if chosen.target == "cpu" else chosen.target
    rows = []
    for policy in case.policies:
        output.announce(f"compiling {case.model} with {policy} for {chosen.target}")
        task = case.task(policy)
        analysis = jact.memory.analyze(case.gradient(policy), *task.abstract(), target=target)
        rows.append(
            case.row(
                policy,
                chosen.target,
                peak_bytes=analysis.temp_bytes,
                saved_bytes=saved_bytes(task.loss, policy, task.abstract()),
                compile_seconds=analysis.compile_seconds,
            )
        )
    plain = next((row["peak_bytes"] for row in rows if row["policy"] == "off"), None)
    return [row | {"peak_ratio": row["peak_bytes"] / plain if plain else None} for row in rows]


def saved_bytes(loss: Callable[..., Any], policy: str, arguments: tuple[Any, ...]) -> int:
    """Counts the bytes kept from the forward pass for the backward pass.

    Args:
        loss: A function `(params, state, batch) -> (scalar, new_state)`.
        policy: "off" and those in `REMAT` count what `jax.vjp` keeps; others ask `jact.report`.
        arguments: The arguments of `loss`, or their shapes and dtypes.

    Returns:
        Bytes. Arguments of the loss outlive the gradient anyway and are not counted.
    """

    def scalar_loss(*args: Any) -> jax.Array:
        return loss(*args)[0]

    if policy == "off" or policy in REMAT:
        return _residual_bytes(scalar_loss, arguments)
    return jact.report(scalar_loss, policy)(*arguments).saved_bytes


def _residual_bytes(loss: Callable[..., jax.Array], arguments: tuple[Any, ...]) -> int:
    def residuals(params: Any, *rest: Any) -> list[jax.Array]:
        # The pullback is a pytree whose leaves are the residuals.
        _, pullback = jax.vjp(lambda params: loss(params, *rest), params)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(residuals)(*arguments).jaxpr
    kept_anyway = {*jaxpr.invars, *jaxpr.constvars}
    # A residual that two operations share is one array.
    saved = {v for v in jaxpr.outvars if isinstance(v, jex.Var) and v not in kept_anyway}
    avals: list[Any] = [v.aval for v in saved]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
