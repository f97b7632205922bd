"""What a user would pick instead: saved bytes, peak, time and error, each to its own plain run.

JAX's ways are measured here: plain, `jax.checkpoint` around each block (keeping nothing, products,
or products on the host), jact's policies, and jact together with `jax.checkpoint` (keeping nothing,
or masks), with offloading, and with both. PyTorch's come from the file that
`benchmarks/torch_peer.py` writes, if it is there. What others publish of their systems is printed
below.

Times are processor seconds, interleaved, relative to plain JAX (or to plain PyTorch). Offloading
shows in peaks for a GPU only (`--target`), where nothing is run.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import rich.console
import rich.table

import jact
import jact.memory
from benchmarks import fidelity, options, output
from benchmarks.models import MODELS
from benchmarks.models.task import Wrap
from benchmarks.options import REMAT
from benchmarks.peak import saved_bytes
from benchmarks.published import PUBLISHED
from benchmarks.time import interleave


def _offloads_dots(block: type[nn.Module]) -> type[nn.Module]:
    save = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return nn.remat(block, policy=save)


def _is_comparison(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in {"eq", "ge", "gt", "le", "lt", "ne"}


def _saves_masks(block: type[nn.Module]) -> type[nn.Module]:
    return nn.remat(block, policy=_is_comparison)


WAYS: dict[str, tuple[Wrap, str]] = {
    "plain": (False, "off"),
    "checkpoint": (True, "off"),
    "checkpoint, products saved": (REMAT["remat-dots"], "off"),
    "checkpoint, products on the host": (_offloads_dots, "off"),
    "int8": (False, "int8"),
    "int4": (False, "int4"),
    "int2": (False, "int2"),
    "gact-l1": (False, "gact-l1"),
    "int4 + checkpoint": (True, "int4"),
    "int4 + checkpoint, masks saved": (_saves_masks, "int4"),
    "int4 + offload": (False, "offload-int4"),
    "int4 + checkpoint + offload": (True, "offload-int4"),
}
"""How each block is wrapped, and the policy of the whole."""

TORCH = pathlib.Path(__file__).parent / "results" / "torch_peer.json"

LINE = "policy"
COLUMNS: output.Columns = {
    "saved MiB": output.mib_or_dash("saved_bytes"),
    "peak MiB": output.mib_or_dash("peak_bytes"),
    "/ plain": output.number("peak_ratio", ".2f"),
    "time / plain": output.number("time_ratio", ".2f"),
    "relative error": output.number("relative_error", ".1e"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    options.add_target(parser)
    models = options.names("model", MODELS)
    parser.add_argument("--model", type=models, default="resnet20,transformer_small")
    parser.add_argument("--batch", type=options.positive, help="None is the model's own")
    parser.add_argument("--layers", type=options.positive, help="None is the model's own")
    ways = options.names("way", WAYS, ";")
    parser.add_argument("--ways", type=ways, default=";".join(WAYS), help="apart by ;, plain first")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing; 0 for none")
    parser.add_argument("--torch", type=pathlib.Path, default=TORCH, help="torch_peer.py's file")


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each model and way, those of PyTorch after those of JAX."""
    options.use_cpu()
    torch = json.loads(chosen.torch.read_text()) if chosen.torch.exists() else []
    for model in chosen.model:
        yield from relative(measure(model, chosen), f"{model}\nJAX, {chosen.target}")
        own = [row for row in torch if row["model"] == model]
        if own and chosen.target == "cpu":
            yield from relative(own, f"{model}\n{own[0]['framework']}, cpu")


def relative(rows: Sequence[dict[str, Any]], label: str) -> Iterator[dict[str, Any]]:
    """The rows, each with its peak relative to the first one's, plain."""
    for row in rows:
        yield row | {"label": label, "peak_ratio": row["peak_bytes"] / rows[0]["peak_bytes"]}


def measure(model: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles every way; on the CPU, runs and times them."""
    here = chosen.target == "cpu"
    target = None if here else chosen.target
    tasks = {
        way: MODELS[model].task(batch=chosen.batch, layers=chosen.layers, remat=WAYS[way][0])
        for way in chosen.ways
    }
    plain = tasks[chosen.ways[0]]
    arguments = plain.arguments() if here else plain.abstract()
    analyses = {}
    for way, task in tasks.items():
        output.announce(f"compiling {model}: {way}")
        gradient = jax.jit(options.differentiated(task.loss, WAYS[way][1]))
        analyses[way] = jact.memory.analyze(gradient, *arguments, target=target)
    ratios, errors = {}, {}
    if here and chosen.rounds:
        compiled = {way: analysis.compiled for way, analysis in analyses.items()}
        seconds = interleave(compiled, arguments, chosen.rounds, time.process_time)
        exact = fidelity.flat_gradient(compiled[chosen.ways[0]], arguments)
        for way in chosen.ways:
            pairs = zip(seconds[way], seconds[chosen.ways[0]], strict=True)
            ratios[way] = statistics.median(own / plain for own, plain in pairs)
            gradient = fidelity.flat_gradient(compiled[way], arguments)
            errors[way] = fidelity.relative_error(gradient, exact)
    return [
        {
            "framework": f"JAX {jax.__version__}",
            "model": model,
            "policy": way,
            "target": chosen.target,
            "saved_bytes": saved_bytes(tasks[way].loss, WAYS[way][1], tasks[way].abstract()),
            "peak_bytes": analyses[way].temp_bytes,
            "time_ratio": ratios.get(way),
            "relative_error": errors.get(way),
        }
        for way in chosen.ways
    ]


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> None:
    """Prints what others publish."""
    del rows, chosen
    table = rich.table.Table(title="published elsewhere")
    for column in PUBLISHED[0]:
        table.add_column(column)
    for row in PUBLISHED:
        table.add_row(*row.values())
    rich.console.Console(stderr=True).print(table)
