"""A thousand layers in the memory of a hundred and fifty (Chakrabarti & Moseley, 2019, section 4).

The network is the paper's: a pre-activation ResNet with bottlenecks (He et al., 2016) of 9 n + 2
layers. All of them have their stages as loops, plain JAX too. Peaks are those of the compiled
training step, with SGD and momentum; `--steps` runs a few of the deep one.

XLA's CPU backend stores 4-bit integers that a loop stacks up in a byte each; on other targets they
take half of one.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

import jact
import jact.memory
from benchmarks import options, output
from benchmarks.models.deep import deep_resnet

LINE = "policy"
COLUMNS: output.Columns = {
    "depth": output.number("depth", "d"),
    "peak MiB": output.mib("peak_bytes"),
    "/ plain": output.number("ratio", ".2f"),
    "compile s": output.number("compile_seconds", ".0f"),
    "losses": lambda row: " ".join(f"{loss:.3f}" for loss in row["losses"]) or "-",
    "s/step": output.number("seconds", ".1f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    options.add_target(parser)
    parser.add_argument("--batch", type=options.positive, default=128)
    parser.add_argument("--channels", type=options.positive, default=16, help="of the first stage")
    parser.add_argument("--side", type=options.positive, default=32, help="of the images")
    parser.add_argument("--shallow", type=options.positive, default=17, help="n of plain JAX")
    parser.add_argument("--deep", type=options.positive, default=111, help="n of jact")
    parser.add_argument("--policy", default="int4", help="what jact stores activations by")
    parser.add_argument("--steps", type=int, default=0, help="training steps of the deep network")


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields plain JAX at the smaller and the greater depth, then jact at both."""
    options.use_cpu()
    first = None
    for policy in ("off", chosen.policy):
        for blocks in (chosen.shallow, chosen.deep):
            output.announce(f"compiling {9 * blocks + 2} layers with {policy}")
            row = measure(policy, blocks, chosen)
            first = first or row["peak_bytes"]
            yield row | {"ratio": row["peak_bytes"] / first}


def measure(policy: str, blocks: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Compiles the step of one network, and runs it if it is the one to run."""
    task = deep_resnet(
        chosen.batch, blocks, "f32", False, channels=chosen.channels, side=chosen.side
    )
    step, optimizer = make_step(task.loss, policy)
    arguments = jax.eval_shape(lambda: with_optimizer(task.arguments(), optimizer))
    target = None if chosen.target == "cpu" else chosen.target
    analysis = jact.memory.analyze(jax.jit(step), *arguments, target=target)
    losses, seconds = [], None
    if policy != "off" and blocks == chosen.deep and chosen.steps and target is None:
        state = with_optimizer(task.arguments(), optimizer)
        start = time.perf_counter()
        for _ in range(chosen.steps):
            loss, *state = analysis.compiled(*state)
            losses.append(float(loss))
            output.announce(f"step {len(losses)}: loss {losses[-1]:.4f}")
        seconds = (time.perf_counter() - start) / chosen.steps
    size = f"batch {chosen.batch}, {chosen.side} x {chosen.side}, {chosen.channels} channels"
    return {
        "label": f"pre-activation ResNet\n[dim]{size}, {chosen.target}[/dim]",
        "policy": policy,
        "depth": 9 * blocks + 2,
        "batch": chosen.batch,
        "target": chosen.target,
        "peak_bytes": analysis.temp_bytes,
        "compile_seconds": analysis.compile_seconds,
        "losses": losses,
        "seconds": seconds,
        "jax": jax.__version__,
    }


def with_optimizer(arguments: Any, optimizer: optax.GradientTransformation) -> tuple[Any, ...]:
    """Parameters, state, the optimizer's state, and the batch."""
    params, state, batch = arguments
    return params, state, optimizer.init(params), batch


def make_step(
    loss: Callable[..., Any], policy: str
) -> tuple[Callable[..., Any], optax.GradientTransformation]:
    """The training step, which returns the loss and its own arguments, and its optimizer."""
    optimizer = optax.sgd(0.01, 0.9)
    gradient = options.differentiated(loss, policy)

    def step(params: Any, state: Any, optimizer_state: Any, batch: Any) -> tuple[Any, ...]:
        (value, state), grads = gradient(params, state, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return value, optax.apply_updates(params, updates), state, optimizer_state, batch

    return step, optimizer
