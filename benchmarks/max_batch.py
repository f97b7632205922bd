"""The largest batch whose training step fits into a device's memory, under each policy.

A step is the gradient and SGD with momentum, which update donated parameters, momentum and state.
Nothing is run and nothing is allocated: the compiler is asked at a few sizes.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

import jact.memory
from benchmarks import options, output
from benchmarks.models import Task
from benchmarks.options import Case, use_cpu
from jact.memory.sizes import parse_bytes

COLUMNS: output.Columns = {
    "largest": lambda row: str(row["batch"]),
    "/ off": output.number("ratio", ".2f"),
    "memory MiB": output.mib("bytes"),
    "compiled": lambda row: str(len(row["probes"])),
}

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--memory", default="16 GiB", help="what the device has")
    options.add_target(parser)
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="the bracket's width as a share; 0 is exact"
    )
    parser.add_argument("--multiple", type=int, default=1, help="sizes are multiples of it")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case; the search starts at the case's batch."""
    use_cpu()
    first = None
    for policy in case.policies:
        output.announce(f"compiling {case.model} with {policy} for {chosen.target}")
        found = jact.memory.max_batch(
            lambda batch, policy: training_step(case.with_batch(batch).task(policy), policy),
            parse_bytes(chosen.memory),
            target=None if chosen.target == "cpu" else chosen.target,
            policies=[policy],
            start=case.overrides["batch"],
            multiple=chosen.multiple,
            tolerance=chosen.tolerance,
        )
        (result,) = found.to_json()["results"]
        first = result["size"] if policy == "off" else first
        size = result.pop("size")
        row = case.with_batch(size).row(policy, chosen.target) | result
        sizes = f"{row['dtype']}, {row['layers']} layers, {chosen.target}, {chosen.memory}"
        yield row | {
            "label": f"{case.model}\n[dim]{sizes}[/dim]",
            "memory": found.memory,
            "ratio": size / first if first else None,
        }


def training_step(
    task: Task, policy: str, optimizer: optax.GradientTransformation = MOMENTUM
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a training step, and the shapes of its arguments, all but the batch donated."""
    gradient = options.differentiated(task.loss, policy)

    def step(params: Any, optimizer_state: Any, state: Any, batch: Any) -> tuple[Any, ...]:
        (loss, state), grads = gradient(params, state, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, state, loss

    params, state, batch = task.abstract()
    optimizer_state = jax.eval_shape(optimizer.init, params)
    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, optimizer_state, state, batch)
