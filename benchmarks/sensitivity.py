"""Local sensitivities next to exact ones: how far they agree, what they cost.

One line for each codec, over all residuals of the model. Of `--policies`, the first that saves
anything chooses the residuals. Costs are in backward passes of plain JAX: what the probe takes
beyond a training step with that policy. Peaks are those of the compiled programs.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import scipy.stats

import jact
import jact.memory
from benchmarks import output
from benchmarks.options import Case, positive
from jact import codecs
from jact.adapt import Probe, Sensitivities

LINE = "codec"

COLUMNS: output.Columns = {
    "residuals": output.number("residuals", "d"),
    "Spearman": output.number("spearman", ".3f"),
    "within 1.5": output.number("within", ".2f"),
    "ratio": output.number("ratio", ".2f"),
    "bias, exact": output.number("bias_share", ".2f"),
    "local": output.number("local_bias_share", ".2f"),
    "backward passes": output.number("backward_passes", ".1f"),
    "unbiased": output.number("backward_passes_unbiased", ".1f"),
    "peak MiB": output.mib("peak_bytes"),
    "of step": output.mib("step_peak_bytes"),
    "plain": output.mib("plain_peak_bytes"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--codecs", default="int8,int4,int2", help="comma-separated candidates")
    parser.add_argument("--draws", type=positive, default=8, help="of each rounding, exactly")
    parser.add_argument("--samples", type=positive, default=1, help="random directions, locally")
    parser.add_argument("--steps", type=int, default=0, help="of training before it, by SGD")


def measure(case: Case, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each codec."""
    policy = next(p for p in case.policies if p not in ("off", "remat"))
    candidates = [parse(name) for name in chosen.codecs.split(",")]
    task = case.task(policy)
    arguments = trained(case, task.arguments(), chosen.steps)
    options: dict[str, Any] = {"policy": policy, "has_aux": True}
    output.announce(f"estimating sensitivities of {case.model}")
    local = jact.sensitivity(task.loss, candidates, samples=chosen.samples, **options)(*arguments)
    cost = costs(case, task.loss, candidates, policy, chosen.samples, arguments)
    output.announce(f"measuring sensitivities of {case.model}")
    exact = jact.sensitivity(
        task.loss, candidates, method="exact", samples=chosen.draws, **options
    )(*arguments)
    for j, codec in enumerate(exact.codecs):
        if not isinstance(codec, codecs.Keep):
            yield case.row(
                policy,
                jax.default_backend(),
                codec=codec.name,
                **agreement(local, exact, j),
                **cost,
            )


def parse(name: str) -> codecs.Codec:
    """Returns a codec by its name; "int4-nearest" and the like are understood, too."""
    plain = name.removesuffix("-nearest")
    codec = codecs.resolve(plain)
    if plain == name:
        return codec
    assert isinstance(codec, codecs.Quantize)
    return codecs.Quantize(bits=codec.bits, stochastic=False)


def trained(case: Case, arguments: tuple[Any, Any, Any], steps: int) -> tuple[Any, Any, Any]:
    """Returns the arguments after some steps of plain gradient descent on their one batch."""
    params, state, batch = arguments
    gradient = jax.jit(case.gradient("off"))
    for _ in range(steps):
        (_, state), grads = gradient(params, state, batch)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    return params, state, batch


def agreement(local: Sensitivities, exact: Sensitivities, j: int) -> dict[str, Any]:
    """Compares two tables for one codec."""
    chosen = np.isfinite(exact.error[:, j])
    ours, theirs = local.error[chosen, j], exact.error[chosen, j]
    ratios = ours / theirs
    return {
        "residuals": int(chosen.sum()),
        "spearman": float(scipy.stats.spearmanr(ours, theirs)[0]) if len(ours) > 2 else None,
        "within": float(np.mean((ratios < 1.5) & (ratios > 1 / 1.5))) if len(ours) else None,
        "ratio": float(ours.sum() / theirs.sum()) if len(ours) else None,
        "bias_share": float(exact.bias[chosen, j].sum() / theirs.sum()) if len(ours) else None,
        "local_bias_share": float(local.bias[chosen, j].sum() / ours.sum()) if len(ours) else None,
        "ratios": ratios.tolist(),
        "relative_errors": (theirs / exact.gradient).tolist(),
    }


def costs(
    case: Case,
    loss: Callable[..., Any],
    candidates: list[codecs.Codec],
    policy: str,
    samples: int,
    arguments: tuple[Any, Any, Any],
) -> dict[str, Any]:
    """Times and peaks of the probe, with biases and without, and of what it is compared to."""
    key = jax.random.key(0)

    def probe(bias: bool) -> Callable[..., Any]:
        return Probe(
            loss, candidates, policy=policy, has_aux=True, samples=samples, bias=bias
        ).__call__

    programs = {
        "forward": (jax.jit(loss), arguments),
        "plain": (jax.jit(case.gradient("off")), arguments),
        "step": (jax.jit(case.gradient(policy)), arguments),
        "probe": (jax.jit(probe(True)), (key, *arguments)),
        "unbiased": (jax.jit(probe(False)), (key, *arguments)),
    }
    analyses = {n: jact.memory.analyze(fun, *args) for n, (fun, args) in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(4):
        for name, (_, args) in programs.items():
            start = time.process_time()
            jax.block_until_ready(analyses[name].compiled(*args))
            seconds[name].append(time.process_time() - start)
    # The first run of each warms up.
    medians = {name: float(np.median(runs[1:])) for name, runs in seconds.items()}
    backward = medians["plain"] - medians["forward"]
    return {
        "backward_passes": (medians["probe"] - medians["step"]) / backward,
        "backward_passes_unbiased": (medians["unbiased"] - medians["step"]) / backward,
        "cpu_seconds": medians,
        "compile_seconds": {n: a.compile_seconds for n, a in analyses.items()},
        "peak_bytes": analyses["probe"].temp_bytes,
        "unbiased_peak_bytes": analyses["unbiased"].temp_bytes,
        "step_peak_bytes": analyses["step"].temp_bytes,
        "plain_peak_bytes": analyses["plain"].temp_bytes,
    }
