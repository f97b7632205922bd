"""How deep, wide and finely resolved a model may be in a given memory (Liu et al., 2022, GACT).

ResNet-152 and BERT large grow along one axis at a time, at a fixed batch, until the training step
does not fit; `jact.memory.max_batch` finds where that is. Nothing is run and nothing is allocated.

Blocks of the same shape are one loop, so that a thousand of them compile as fast as two. Plain JAX
is measured written out as well, and all are compared to that: XLA fuses more of what the backward
pass needs there, so the loop would make the gain look larger than it is.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

import jact.memory
from benchmarks import options, output
from benchmarks.max_batch import MOMENTUM, training_step
from benchmarks.models import Task
from benchmarks.models.bert import bert
from benchmarks.models.resnet import like_resnet152, resnet
from jact.memory.sizes import parse_bytes


@dataclasses.dataclass(frozen=True)
class Axis:
    """One of a model's sizes.

    Attributes:
        usual: The size that the model has by its name.
        multiple: Sizes are multiples of it.
    """

    usual: int
    multiple: int = 1


@dataclasses.dataclass(frozen=True)
class Growing:
    """A model that grows.

    Attributes:
        build: Takes the sizes by name, `remat` and `looped`, and returns the task.
        optimizer: What it is usually trained with; its state counts.
        axes: The sizes by name.
    """

    build: Callable[..., Task]
    optimizer: optax.GradientTransformation
    axes: Mapping[str, Axis]

    def task(self, axis: str, size: int, *, remat: bool, looped: bool) -> Task:
        """Builds the model with one of its sizes changed."""
        sizes = {name: axis.usual for name, axis in self.axes.items()} | {axis: size}
        return self.build(**sizes, remat=remat, looped=looped)


def _resnet152(blocks: int, width: int, side: int, *, remat: bool, looped: bool) -> Task:
    sizes = {"stages": like_resnet152, "width": width, "side": side}
    return resnet(64, blocks, "f32", remat, looped=looped, **sizes)


def _bert_large(layers: int, width: int, length: int, *, remat: bool, looped: bool) -> Task:
    return bert(16, layers, "f32", remat, width=width, length=length, looped=looped)


# The batches, and what a width is, are those of GACT's own scripts (github.com/LiuXiaoxuanPKU/
# GACT-ICML, benchmark/vision and benchmark/nlp).
MODELS = {
    "resnet152": Growing(
        _resnet152, MOMENTUM, {"blocks": Axis(50), "width": Axis(64, 8), "side": Axis(224, 8)}
    ),
    "bert_large": Growing(
        _bert_large,
        optax.adam(1e-5),
        {"layers": Axis(24), "width": Axis(1024, 64), "length": Axis(128, 16)},
    ),
}
AXES = tuple(dict.fromkeys(axis for model in MODELS.values() for axis in model.axes))

WAYS: dict[str, tuple[bool, bool, str]] = {
    "plain, as a loop": (False, True, "off"),
    "plain": (False, False, "off"),
    "checkpoint": (True, True, "off"),
    "int4": (False, True, "int4"),
    "int2": (False, True, "int2"),
    "int4 + checkpoint": (True, True, "int4"),
}
"""Whether blocks are rematerialised, whether they are a loop, and the policy of the whole."""

LINE = "way"
COLUMNS: output.Columns = {
    "largest": lambda row: str(row["size"]),
    "/ plain": output.number("ratio", ".2f"),
    "memory MiB": output.mib("bytes"),
    "too large": lambda row: str(row["too_large"] or "-"),
    "compiled": lambda row: str(len(row["probes"])),
    "compile s": output.number("seconds", ".0f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    options.add_target(parser)
    parser.add_argument("--memory", default="16 GiB", help="what the device has")
    parser.add_argument("--model", type=options.names("model", MODELS), default=",".join(MODELS))
    parser.add_argument("--axes", type=options.names("axis", AXES), default=",".join(AXES))
    ways = options.names("way", WAYS, ";")
    parser.add_argument("--ways", type=ways, default=";".join(WAYS), help="apart by ;")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="the bracket's width as a share; 0 is exact"
    )


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, axis and way."""
    options.use_cpu()
    for name in chosen.model:
        for axis in chosen.axes:
            if axis in MODELS[name].axes:
                rows = list(grow(name, axis, chosen))
                plain = next((row for row in rows if row["way"] == "plain"), rows[0])["size"]
                yield from (row | {"ratio": row["size"] / plain if plain else None} for row in rows)


def grow(name: str, axis: str, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the largest size along one axis under each way."""
    model = MODELS[name]
    size = model.axes[axis].usual
    for way in chosen.ways:
        output.announce(f"compiling {name} with {way}; {axis}:")
        remat, looped, policy = WAYS[way]

        def make_step(
            size: int, policy: str, remat: bool = remat, looped: bool = looped
        ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            output.announce(f"  {size}")
            task = model.task(axis, size, remat=remat, looped=looped)
            return training_step(task, policy, model.optimizer)

        found = jact.memory.max_batch(
            make_step,
            parse_bytes(chosen.memory),
            target=None if chosen.target == "cpu" else chosen.target,
            policies=[policy],
            # What fits the way before is the best guess there is.
            start=size or model.axes[axis].usual,
            multiple=model.axes[axis].multiple,
            tolerance=chosen.tolerance,
        )
        (result,) = found.to_json()["results"]
        size = result["size"]
        output.announce(f"  {size} fits, in {result['bytes'] / output.MIB:,.0f} MiB")
        yield result | {
            "label": f"{name}: {axis}\n[dim]f32, {chosen.target}, {chosen.memory}[/dim]",
            "model": name,
            "axis": axis,
            "usual": model.axes[axis].usual,
            "way": way,
            "policy": policy,
            "target": chosen.target,
            "memory": found.memory,
            "jax": jax.__version__,
        }
