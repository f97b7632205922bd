"""How near the gradient is to plain JAX's: cosine and relative error over all parameters.

The model is freshly initialised. The relative error is |g - g0| / |g0|.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import output
from benchmarks.images import natural
from benchmarks.options import Case, positive

COLUMNS: output.Columns = {
    "cosine": output.number("cosine", ".6f"),
    "relative error": output.number("relative_error", ".2e"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--draws", type=positive, default=1, help="draws of parameters and batch")
    parser.add_argument(
        "--images",
        choices=("noise", "natural"),
        default="noise",
        help="white noise, or images with the spectrum of natural ones",
    )


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each policy of the case."""
    draws = [arguments(case, seed, chosen.images) for seed in range(chosen.draws)]
    plain = [flat_gradient(jax.jit(case.gradient("off")), draw) for draw in draws]
    for policy in case.policies:
        output.announce(f"differentiating {case.model} with {policy}")
        gradient = jax.jit(case.gradient(policy))
        pairs = [
            (flat_gradient(gradient, draw), exact) for draw, exact in zip(draws, plain, strict=True)
        ]
        yield case.row(
            policy,
            jax.default_backend(),
            cosine=float(np.mean([cosine(*pair) for pair in pairs])),
            relative_error=float(np.mean([relative_error(*pair) for pair in pairs])),
        )


def arguments(case: Case, seed: int, images: str) -> tuple[Any, Any, Any]:
    """Returns parameters, state and batch, with natural images if there are images at all."""
    params, state, batch = case.task("off").arguments(seed)
    if images == "natural" and "images" in batch:
        batch = batch | {"images": jax.numpy.asarray(natural(np.asarray(batch["images"])))}
    return params, state, batch


def flat_gradient(gradient: Callable[..., Any], arguments: tuple[Any, ...]) -> np.ndarray:
    """Returns the gradients of all parameters as one float64 vector."""
    _, grads = gradient(*arguments)
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(grads)])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the cosine of the angle between two vectors."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """Returns |approximate - exact| / |exact|."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
