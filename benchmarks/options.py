"""The options that all commands share, and the cases that they ask for."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax.linen as nn
import jax

import jact
import jact.memory
import jact.presets
from benchmarks.models import DTYPES, MODELS, Task
from benchmarks.models.task import Wrap
from jact.spelling import did_you_mean

_EXPENSIVE = ("dot_general", "conv_general_dilated")


def _saves_expensive(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in _EXPENSIVE


# Plain JAX with every block of the model in `nn.remat`, which keeps its input alone, or the results
# of products and convolutions as well.
REMAT: dict[str, Wrap] = {
    "remat": True,
    "remat-dots": lambda block: nn.remat(block, policy=_saves_expensive),
}
LABELS = {
    "off": "plain JAX",
    "remat": "jax.checkpoint per block",
    "remat-dots": "jax.checkpoint, products saved",
}
SHORT_LABELS = {"off": "plain"}
# "off" is plain JAX.
POLICIES = tuple(dict.fromkeys(("off", *REMAT, *jact.presets.NAMES)))


@dataclasses.dataclass(frozen=True)
class Case:
    """One model at one size, to be measured under several policies.

    Attributes:
        model: Its name in `MODELS`.
        policies: Names out of `POLICIES`.
        overrides: The arguments of `Model.task` besides `remat`.
    """

    model: str
    policies: tuple[str, ...]
    overrides: dict[str, Any]

    def task(self, policy: str) -> Task:
        """Returns the model; only the policies in `REMAT` change it."""
        return MODELS[self.model].task(**self.overrides, remat=REMAT.get(policy, False))

    def with_batch(self, batch: int) -> "Case":
        """Returns the same case with another number of examples."""
        return dataclasses.replace(self, overrides=self.overrides | {"batch": batch})

    def gradient(self, policy: str) -> Callable[..., Any]:
        """Returns the function that is measured: `(params, state, batch) -> (value, gradient)`."""
        return differentiated(self.task(policy).loss, policy)

    def row(self, policy: str, target: str, **figures: Any) -> dict[str, Any]:
        """Returns a result: what was measured, followed by its figures."""
        return {
            "model": self.model,
            "dtype": self.overrides["dtype"],
            "batch": self.overrides["batch"],
            "layers": self.overrides["layers"],
            "target": target,
            "policy": policy,
            "jax": jax.__version__,
            **figures,
        }


def differentiated(loss: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """Returns `value_and_grad` of a loss with auxiliary data.

    It is JAX's own under "off", and under the policies in `REMAT`, which are in the model.
    """
    if isinstance(policy, str) and policy in ("off", *REMAT):
        return jax.value_and_grad(loss, has_aux=True)
    return jact.value_and_grad(loss, has_aux=True, policy=policy)


def use_cpu() -> None:
    """Keeps JAX from looking for a device where a process only compiles."""
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command."""
    parser.add_argument(
        "--model",
        type=names("model", MODELS),
        default="convnet_small,transformer_small",
        help=f"comma-separated: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--policies",
        type=names("policy", POLICIES),
        default="off,remat,int8,int4,int2",
        help=f"comma-separated: {', '.join(POLICIES)}",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="what the model computes in")
    parser.add_argument("--batch", type=positive, help="examples; None is the model's own number")
    parser.add_argument("--layers", type=positive, help="blocks; None is the model's own number")
    add_json(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the option that says which device to compile for."""
    targets = ("cpu", *jact.memory.TARGETS)
    parser.add_argument("--target", choices=targets, default="cpu", help="device to compile for")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option that says where results go."""
    parser.add_argument("--json", metavar="FILE", help='where to write the results; "-" is stdout')


def cases(chosen: argparse.Namespace) -> Iterator[Case]:
    """Yields one case for each chosen model."""
    for name in chosen.model:
        overrides = {
            "batch": chosen.batch or MODELS[name].batch,
            "layers": chosen.layers or MODELS[name].layers,
            "dtype": chosen.dtype,
        }
        yield Case(name, chosen.policies, overrides)


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return number


def names(
    kind: str, allowed: Collection[str], separator: str = ","
) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser of names out of `allowed`.

    Args:
        kind: What the names name, for the message about an unknown one.
        allowed: All names there are.
        separator: What stands between two.
    """

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(separator)))
        for name in names:
            if name not in allowed:
                choices = f"{separator} ".join(allowed)
                hint = did_you_mean(name, allowed)
                raise argparse.ArgumentTypeError(
                    f"unknown {kind} {name!r}; choose from {choices}{hint}"
                )
        return names

    return parse
