"""Depth: each further layer costs its codes, and a loop's program does not grow with its length."""

import functools
from typing import Any

import jax
import pytest

import jact
from benchmarks.models.convnet import convnet
from benchmarks.models.scanned import ScannedTransformer
from benchmarks.models.transformer import transformer

small = functools.partial(transformer, batch=8, width=128, heads=4, length=128)
#: How to build each model, and the policy. XLA's CPU backend unpacks 4-bit integers that a loop
#: stacks up, so there it is 8.
MODELS: dict[str, tuple[Any, str]] = {
    "transformer": (small, "int4"),
    "convnet": (functools.partial(convnet, batch=32, channels=16), "int4"),
    "scanned": (functools.partial(small, stack=ScannedTransformer), "int8"),
}


@pytest.mark.parametrize(
    "name", ["transformer", pytest.param("convnet", marks=pytest.mark.slow), "scanned"]
)
def test_layers_cost_their_codes(name: str) -> None:
    build, policy = MODELS[name]

    def measure(layers: int) -> tuple[int, int, int]:
        task = build(layers=layers, dtype="f32", remat=False)
        grad = jact.value_and_grad(task.loss, has_aux=True, policy=policy)
        report = jact.report(task.loss, policy, has_aux=True)(*task.abstract())
        compiled = jax.jit(grad).lower(*task.abstract()).compile()
        lines = compiled.as_text().count("\n")
        return compiled.memory_analysis().temp_size_in_bytes, report.saved_bytes, lines

    (peak, saved, lines), (deep_peak, deep_saved, deep_lines) = measure(4), measure(12)
    assert deep_saved > 2.5 * saved
    assert deep_peak - peak <= 1.15 * (deep_saved - saved)
    if name == "scanned":
        assert deep_lines <= 1.02 * lines
