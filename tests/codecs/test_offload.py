"""Offloaded codes: the same gradient, in host memory where there is one, and said where not."""

import dataclasses
import importlib.metadata
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact
import jact.memory
from jact.codecs import Keep, Mask, Offload, Quantize
from jact.memory.report import Peak

LAYERS, WIDTH, BATCH = 6, 128, 1024
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
INPUT = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
HAS_CUDA_COMPILER = any(
    plugin.name.startswith("xla_cuda")
    for plugin in importlib.metadata.entry_points(group="jax_plugins")
)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) + x


def unrolled(weights: jax.Array, x: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)


@pytest.mark.parametrize("fun", [unrolled, scanned])
@pytest.mark.parametrize("inner", ["keep", "int4"])
def test_gradient_is_that_of_the_inner_codec(fun: Callable[..., jax.Array], inner: str) -> None:
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=WEIGHTS.shape) / 16, jnp.float32)
    x = jnp.asarray(rng.normal(size=INPUT.shape), jnp.float32)
    codec = Offload(inner=jact.codecs.resolve(inner))
    ours = jax.jit(jact.grad(fun, policy=codec))(weights, x)
    plain = jact.grad(fun, policy=jact.Policy(default=inner))
    np.testing.assert_allclose(ours, jax.jit(plain)(weights, x), rtol=1e-5, atol=1e-9)


def normalised(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """A product, BatchNorm, GELU and a product."""
    v, w = weights
    h = x @ v
    h = (h - h.mean(0)[None]) * jax.lax.rsqrt(h.var(0) + 1e-5)[None]
    return jnp.mean((jax.nn.gelu(h) @ w) ** 2)


@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_saved_is_that_of_the_inner_codec(bits: int) -> None:
    """What follows from a codec, as saving derivatives does at two bits, follows from the inner."""
    v, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, 512), (512, WIDTH)))

    def saved(codec: jact.codecs.Codec) -> list[tuple[str, str]]:
        rows = jact.report(normalised, codec)((v, w), INPUT).rows
        return [(row.name, row.codec.removeprefix("offload-")) for row in rows if row.bytes > 2**16]

    inner = Quantize(bits=bits)
    assert saved(Offload(inner=inner)) == saved(inner)
    # The normalised values are of unlike channels, and their ranges lie across them.
    assert "int8" in dict(saved(inner)).values()


def test_what_is_offloaded_and_what_the_report_says() -> None:
    policy = jact.Policy(default="offload", min_bytes=0)
    report = jact.report(unrolled, policy, peak=True)(WEIGHTS, INPUT)
    offloaded = [row for row in report.rows if row.offloaded]
    # As large as before, and yet worth it: the last layer's results are read at once.
    assert len(offloaded) >= LAYERS and {row.codec for row in offloaded} == {"offload"}
    assert report.offloaded_bytes == sum(row.bytes for row in offloaded)
    assert "is sent to host memory. A CPU has no other" in str(report).replace("\n", " ")
    for host_bytes, words in [
        (0, "But the compiler dropped the transfers"),
        (2**20, "The compiled program keeps 1.0 MiB there."),
    ]:
        peak = Peak(plain_bytes=2048, bytes=1024, host_bytes=host_bytes)
        text = str(dataclasses.replace(report, peak=peak)).replace("\n", " ")
        assert words in text
    in_loop = jact.report(scanned, "offload-int4")(WEIGHTS, INPUT)
    assert [row.codec for row in in_loop.rows if row.offloaded] == ["offload-int4"] * len(
        [row for row in in_loop.rows if row.offloaded]
    )
    assert in_loop.offloaded_bytes > 0
    assert jact.report(scanned, "int4")(WEIGHTS, INPUT).offloaded_bytes == 0


def test_plans_and_supported_arrays() -> None:
    plan = jact.make_plan(unrolled, "offload-int4")(WEIGHTS, INPUT)
    assert jact.Plan.from_json(plan.to_json()) == plan
    assert set(plan.bits.values()) == {"offload-int4"}
    assert Offload().supports((), jnp.int32) and Offload(inner=Mask()).supports((3,), bool)
    for dtype in (jax.random.key(0).dtype, jax.dtypes.float0):
        assert not Offload().supports((3,), dtype)
    assert not Offload(inner=Quantize()).supports((3,), jnp.float32)
    assert Offload(inner=Keep()).nbytes((3,), jnp.float32) == 12


@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="the CUDA plugin is missing")
def test_compiled_for_a_gpu() -> None:
    """Loops send their codes to the host asynchronously; XLA drops the transfers of layers."""
    device = jact.memory.analyze(jact.grad(scanned, policy="int4"), WEIGHTS, INPUT, target="h100")
    host = jact.memory.analyze(
        jact.grad(scanned, policy="offload-int4"), WEIGHTS, INPUT, target="h100"
    )
    codes = Quantize(bits=4).nbytes(INPUT.shape, INPUT.dtype) * LAYERS
    assert host.temp_bytes <= device.temp_bytes - 0.8 * codes
    assert host.host_temp_bytes >= codes
    text = host.compiled.as_text()
    assert "S(5)" in text and "dynamic-update-slice-start" in text and "slice-start" in text
    layers = jact.memory.analyze(
        jact.grad(unrolled, policy="offload"), WEIGHTS, INPUT, target="h100"
    )
    assert layers.host_temp_bytes == 0
