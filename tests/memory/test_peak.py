import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jact.memory
from jact.memory import targets

pytestmark = pytest.mark.oldest

SHAPE = (256, 128)
MATRIX_BYTES = 256 * 128 * 4


def _installed(platform: str) -> bool:
    if platform == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(plugin.name.startswith("xla_cuda") for plugin in plugins)


def _if_installed(name: str) -> Any:
    kind = re.split(r":|x(?=\d+$)", name)[0] if name not in targets.TARGETS else name
    platform = targets.TARGETS[kind].platform
    missing = pytest.mark.skipif(
        not _installed(platform), reason=f"the {platform} plugin is missing"
    )
    return pytest.param(name, marks=missing)


TARGETS = [_if_installed(name) for name in targets.TARGETS]
# One of each platform, for what does not depend on the device.
PLATFORMS = [_if_installed(name) for name in ("h100", "v5e")]
MESHES = [_if_installed(name) for name in ("h100x4", "v5e:2x2")]


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def structs(size: int = 128, batch: int = 256) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        jax.ShapeDtypeStruct((size, size), jnp.float32),
        jax.ShapeDtypeStruct((batch, size), jnp.float32),
    )


def test_counts_the_saved_activations() -> None:
    # Each of the four tanh keeps its output for the backward pass.
    peak = jact.memory.peak(jax.grad(loss), *structs())
    assert 4 * MATRIX_BYTES <= peak <= 8 * MATRIX_BYTES


def test_grows_with_the_batch_and_is_deterministic() -> None:
    small, again, large = (
        jact.memory.peak(jax.grad(loss), *structs(batch=batch)) for batch in (256, 256, 1024)
    )
    assert small == again
    assert 3 * small < large < 5 * small


def test_arrays_structs_and_jitted_functions_agree() -> None:
    gradient = jax.grad(loss)
    described = structs()
    arrays = [jnp.ones(s.shape, s.dtype) for s in described]
    numpy = [np.ones(s.shape, s.dtype) for s in described]
    peaks = {
        jact.memory.peak(fun, *args)
        for fun in (gradient, jax.jit(gradient))
        for args in (described, arrays, numpy)
    }
    assert len(peaks) == 1


def test_pytrees_and_keywords() -> None:
    def fun(tree: dict[str, jax.Array], *, shift: list[jax.Array]) -> dict[str, jax.Array]:
        return {"out": tree["a"] * tree["b"] + shift[0]}

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    analysis = jact.memory.analyze(fun, {"a": x, "b": x}, shift=[x])
    assert analysis.argument_bytes == 3 * 4096
    assert analysis.output_bytes == 4096


def _branch(x: jax.Array, mode: str, double: bool, activation: Callable, axis: None) -> jax.Array:
    x = activation(x) if mode == "apply" else x
    return 2 * x if double else jnp.sum(x, axis)


def test_leaves_that_are_not_arrays_are_constants() -> None:
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    double = jact.memory.analyze(_branch, x, "apply", True, jnp.sin, None)
    total = jact.memory.analyze(_branch, x, "keep", double=False, activation=jnp.sin, axis=None)
    assert double.output_bytes == 4096
    assert total.output_bytes == 4


def test_static_arguments_of_jitted_functions() -> None:
    jitted = jax.jit(_branch, static_argnames=("mode", "double", "activation"))
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    assert jact.memory.analyze(jitted, x, "apply", True, jnp.sin, None).output_bytes == 4096


def test_donation_of_jitted_functions_is_seen() -> None:
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    assert jact.memory.analyze(jitted, x).alias_bytes == 4096


def test_keys_scalars_and_closures() -> None:
    weights = jnp.ones((1024,))

    def fun(key: jax.Array, scale: float) -> jax.Array:
        return scale * jax.random.normal(key, (1024,)) * weights

    assert jact.memory.analyze(fun, jax.random.key(0), 2.0).output_bytes == 4096
    assert jact.memory.analyze(fun, jax.random.PRNGKey(0), 2.0).output_bytes == 4096


def test_no_arguments() -> None:
    assert jact.memory.analyze(lambda: jnp.zeros(1024)).output_bytes == 4096


def test_analysis_has_the_program_and_its_compile_time() -> None:
    analysis = jact.memory.analyze(jax.grad(loss), *structs())
    assert analysis.compile_seconds > 0
    assert analysis.host_temp_bytes == 0
    assert "dot" in analysis.compiled.as_text()
    assert "compiled" not in repr(analysis)


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'h100', 'h200', 'a100', .*, 'v6e', .*; got 'h300'"):
        jact.memory.peak(jax.grad(loss), *structs(), target="h300")


@pytest.mark.parametrize(
    "name", ["", "h100x", "h100x0", "h100:2x2", "v5ex4", "v5e:", "v5e:2", "rtx40", "v5e:2x2x2x2", 8]
)
def test_what_is_no_target(name: Any) -> None:
    with pytest.raises(ValueError, match="target must be None, one of 'h100'"):
        targets.devices(name)


def test_hosts_hold_eight_gpus() -> None:
    with pytest.raises(ValueError, match="at most 8 GPUs or a multiple of that, got 'h100x12'"):
        targets.devices("h100x12")


@pytest.mark.parametrize(
    ("name", "extra"),
    [("h100", "cuda12"), ("b200x8", "cuda12"), ("v5e", "tpu"), ("v6e:4x4", "tpu")],
)
def test_missing_plugin_names_the_extra(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    targets.devices.cache_clear()
    with pytest.raises(jact.memory.MissingPluginError, match=rf'"jax\[{extra}\]".*"\.\[{extra}\]"'):
        jact.memory.peak(jax.grad(loss), *structs(), target=name)


@pytest.mark.parametrize("name", TARGETS)
def test_targets_see_the_saved_activations(name: str) -> None:
    # Large enough for a TPU, which keeps small arrays in its vector memory and out of the figure.
    arguments = structs(1024, 16384)
    peak = jact.memory.peak(jax.grad(loss), *arguments, target=name)
    activation = 16384 * 1024 * 4
    assert 3 * activation <= peak <= 8 * activation


@pytest.mark.parametrize("name", PLATFORMS)
def test_targets_take_what_the_default_backend_takes(name: str) -> None:
    weights = jnp.ones((1024,))

    def fun(key: jax.Array, x: jax.Array, scale: float, mode: str) -> jax.Array:
        assert mode == "noise"
        return x + scale * jax.random.normal(key, (1024,)) * weights

    def constant() -> jax.Array:
        return jnp.sin(weights)

    arguments = (jax.random.key(0), np.ones(1024, np.float32), 2.0, "noise")
    jitted = jax.jit(fun, static_argnames="mode")
    for run, args in ((fun, arguments), (jitted, arguments), (jax.jit(constant), ())):
        analysis = jact.memory.analyze(run, *args, target=name)
        assert analysis.output_bytes == 4096
        devices = jax.tree.leaves(analysis.compiled.output_shardings)[0].device_set
        assert devices == targets.sharding(name).device_set


@pytest.mark.parametrize("name", PLATFORMS)
def test_targets_work_after_jax_looked_for_devices_in_vain(name: str) -> None:
    # With the plugins installed and no JAX_PLATFORMS, JAX tries them, warns, and takes the CPU.
    code = (
        "import jax, jax.numpy as jnp, jact.memory\n"
        "x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)\n"
        f"jact.memory.peak(lambda x: x @ x, x, target={name!r})\n"
        "print(jax.default_backend(), jnp.ones(2).sum())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("2.0\n")


def test_targets_are_described() -> None:
    for name, target in targets.TARGETS.items():
        assert bool(target.topology) == (target.platform == "tpu")
        assert name.upper() in target.device.upper().replace(" ", "")
        if target.platform == "cuda":
            devices = importlib.resources.files("jact.memory") / "devices"
            text = (devices / f"{name}.txtpb").read_text()
            assert f"{target.device.split()[1]}" in text.splitlines()[0]
            assert text.count("{") == text.count("}")


def sharded(devices: int, specs: tuple[P, P]) -> list[jax.ShapeDtypeStruct]:
    mesh = jax.sharding.AbstractMesh((devices,), ("d",))
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(structs(1024, 4096), specs, strict=True)
    ]


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("jitted", [False, True])
def test_meshes(name: str, jitted: bool) -> None:
    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    data = jact.memory.analyze(gradient, *sharded(4, (P(), P("d"))), target=name)
    # Figures are those of each device, which has a quarter of the batch and all weights.
    assert data.argument_bytes == 1024 * 1024 * 4 + 4096 * 1024
    assert data.collectives == {"all-reduce": 1}
    assert sum(data.kernels.values()) > 8
    single = jact.memory.analyze(gradient, *structs(1024, 4096), target=name)
    assert single.argument_bytes == (1024 * 1024 + 4096 * 1024) * 4
    assert single.collectives == {}
    assert single.temp_bytes > 2 * data.temp_bytes


@pytest.mark.parametrize("name", MESHES)
def test_meshes_that_a_function_names(name: str) -> None:
    mesh = jact.memory.mesh(name, (2, 2), ("x", "y"))

    def total(x: jax.Array) -> jax.Array:
        part = jax.lax.psum(jnp.sum(x), ("x", "y"))
        return jnp.broadcast_to(part, x.shape)

    fun = jax.shard_map(total, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("x", "y")))
    assert jact.memory.analyze(fun, x, target=name).collectives == {"all-reduce": 1}
    with pytest.raises(ValueError, match=rf"has 8 devices, but target={name!r} has 4"):
        jact.memory.mesh(name, (2, 4), ("x", "y"))
    with pytest.raises(ValueError, match="has 8 devices"):
        jact.memory.analyze(jax.grad(loss), *sharded(8, (P(), P("d"))), target=name)


def test_collectives_and_kernels_here() -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(structs(), (P(), P("d")), strict=True)
    ]
    analysis = jact.memory.analyze(jax.jit(jax.grad(loss)), *arguments)
    assert analysis.collectives == {"all-reduce": 1}
    assert analysis.collectives.keys().isdisjoint(analysis.kernels)
    text = analysis.compiled.as_text()
    assert text is not None
    entry = text[text.index("ENTRY") :]
    assert analysis.kernels["dot"] == len(re.findall(r" dot\(", entry)) > 0
    assert sum(analysis.kernels.values()) > 8
    assert "parameter" not in analysis.kernels


def test_total_is_what_lives_at_once() -> None:
    jitted = jax.jit(lambda w, x: (w + 1, x @ w), donate_argnums=0)
    analysis = jact.memory.analyze(jitted, *structs())
    assert analysis.alias_bytes == 128 * 128 * 4
    arguments, outputs = 128 * 128 * 4 + MATRIX_BYTES, MATRIX_BYTES
    # XLA for CPUs counts a table of two pointers to the results as well.
    pointers = analysis.total_bytes - (arguments + outputs + analysis.temp_bytes)
    assert 0 <= pointers <= 16
