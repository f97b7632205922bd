"""All implementations give the same bits, and the right one is taken."""

import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact_kernels
from jact_kernels import compat, implementations, packing, plan_groups
from jact_kernels.mask import reference as mask_reference
from jact_kernels.quantize import pallas_gpu, pallas_tpu, reference
from jact_kernels.quantize.ranges import Scheme
from tests.kernels import triton_on_cpu

BITS = (1, 2, 4, 8)
DTYPES = ("float32", "bfloat16", "float16")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

# Shapes with few columns are odd ones; the GPU kernel must fill a warpgroup.
SHAPES = {
    "pallas_gpu": ((16, 16, 64), (16, 7, 32)),
    "pallas_tpu": ((2, 64, 256), (3, 17, 130), (2, 1, 7, 384)),
    "triton_gpu": ((2, 16, 64), (3, 17, 24), (2, 7, 7, 12)),
}


def hostile(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, but for the first columns, where every group is a special case."""
    random = np.random.default_rng(sum(shape))
    x = random.normal(size=shape)
    limits = jnp.finfo(dtype)
    largest, smallest = float(limits.max), float(limits.smallest_subnormal)
    columns = [
        np.zeros(shape[:-1]),
        np.full(shape[:-1], -0.0),
        np.full(shape[:-1], 3.3),
        x[..., 3] * smallest,
        x[..., 4] * smallest * 2**8,
        np.clip(x[..., 5], -1, 1) * largest,
        np.full(shape[:-1], largest),
        x[..., 7] * 2.0**-12 + 100,
    ]
    for bad in (math.inf, -math.inf, math.nan):
        column = x[..., len(columns)].copy()
        column[(0,) * column.ndim] = bad
        columns.append(column)
    x[..., : len(columns)] = np.stack(columns, -1)
    return x.astype(jnp.dtype(dtype))


def scheme_of(shape: tuple[int, ...], bits: int, *, stochastic: bool = True) -> Scheme:
    # Small groups keep the interpreters' loops short; a TPU's tiles need 64.
    groups = plan_groups(shape, 8 if shape[1] % 64 else 64)
    assert groups is not None
    return Scheme(groups=groups, bits=bits, stochastic=stochastic)


def assert_equal(a: Any, b: Any) -> None:
    """Asserts that two arrays have the same dtype and bits, but for the bits of a NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    kind = np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else np.uint8
    np.testing.assert_array_equal(np.asarray(a).astype(kind), np.asarray(b).astype(kind))


@pytest.fixture(params=["pallas_gpu", "pallas_tpu", pytest.param("triton_gpu", marks=needs_triton)])
def kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Any, Callable[..., Any], Callable[..., Any]]:
    """The name of an implementation, its module, and its two operations, interpreted."""
    if request.param == "triton_gpu":
        module = triton_on_cpu.load("quantize", monkeypatch)
        return request.param, module, module.quantize, module.dequantize
    module: Any = {"pallas_gpu": pallas_gpu, "pallas_tpu": pallas_tpu}[request.param]
    if request.param == "pallas_gpu" and (problem := compat.problem("pallas", "cuda")):
        pytest.skip(problem)
    interpreted = (
        functools.partial(operation, interpret=True)
        for operation in (module.quantize, module.dequantize)
    )
    return request.param, module, *interpreted


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        # What depends on both, a part of the pairs shows.
        pytest.param(dtype, bits, marks=[pytest.mark.slow] * (i > 0 and (i + j) % 3 > 0))
        for i, dtype in enumerate(DTYPES)
        for j, bits in enumerate(BITS)
    ],
)
def test_conformance(kernels: Any, dtype: str, bits: int) -> None:
    name, module, quantize, dequantize = kernels
    taken = 0
    for index, shape in enumerate(SHAPES[name]):
        # Every other case is rounded to the nearest.
        turn = index + DTYPES.index(dtype) + BITS.index(bits)
        scheme = scheme_of(shape, bits, stochastic=turn // 2 % 2 == 0)
        if name == "pallas_gpu" and bits > 1 and turn % 2:
            continue  # One shape has to do for the slowest interpreter.
        if module.unsupported(scheme, dtype) is not None:
            continue
        taken += 1
        x, seed = jnp.asarray(hostile(shape, dtype)), np.uint32(0xDEADBEEF + index)
        expected = jax.jit(functools.partial(reference.quantize, scheme=scheme))(x, seed=seed)
        codes, *stored = quantize(x, seed, scheme=scheme)
        for ours, theirs in zip(stored, expected[1:], strict=True):
            assert_equal(ours, theirs)
        # Triton's interpreter rounds to bfloat16 by itself, and not to the nearest.
        dtype_out = "float32" if name == "triton_gpu" and dtype == "bfloat16" else dtype
        values = reference.dequantize(*expected, scheme=scheme, dtype=jnp.dtype(dtype_out))
        assert jnp.isnan(values).any() and not jnp.isnan(values).all()
        assert_equal(dequantize(*expected, scheme=scheme, dtype=jnp.dtype(dtype_out)), values)
        # The codes of a group that is not finite decode to NaN, whatever they are.
        finite = ~jnp.isnan(values)
        assert codes.dtype == expected[0].dtype and codes.shape == expected[0].shape
        ours, theirs = unpacked(codes, scheme), unpacked(expected[0], scheme)
        assert_equal(jnp.where(finite, ours, 0), jnp.where(finite, theirs, 0))
    left_to_xla = name == "pallas_tpu" and dtype == "float16"
    assert (taken == 0) == left_to_xla


def unpacked(codes: jax.Array, scheme: Scheme) -> jax.Array:
    if scheme.bits < 4:
        codes = packing.unpack(codes, shape=scheme.groups.shape, bits=scheme.bits)
    return codes.astype(jnp.uint8)


@pytest.mark.oldest
def test_the_inverse_of_a_step_is_correct() -> None:
    """For every step there is: the bfloat16 numbers from the least one on."""
    steps = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    steps = steps[steps >= np.float32(2.0**-100)].astype(np.float64)
    assert len(steps) > 29_000
    inverse = np.asarray(jax.jit(reference.inverse_step)(steps.astype(np.float32)), np.float64)
    lost = 1 - inverse * steps / 2.0 ** (reference.FRACTION_BITS + 1)
    assert lost.min() >= 0
    assert lost.max() < 2.0**-21


@needs_triton
@pytest.mark.parametrize("shape", [(), (5,), (64,), (16, 5), (2, 24, 7), (2, 3, 4, 5, 6)])
def test_masks_conform(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    module = triton_on_cpu.load("mask", monkeypatch)
    mask = jnp.asarray(np.random.default_rng(0).random(shape) < 0.5)
    packed = mask_reference.pack_mask(mask)
    assert_equal(module.pack_mask(mask), packed)
    assert_equal(module.unpack_mask(packed, shape), mask)


@pytest.fixture
def x() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 256)), jnp.float32)


def chosen(operation: str = "quantize", **options: Any) -> dict[str, str]:
    """The implementation of an operation by platform."""
    rows = jact_kernels.explain((2, 64, 256), **options).rows
    return {row.platform: row.implementation for row in rows if row.operation == operation}


@pytest.mark.oldest
def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen()["tpu"] == "xla"
    monkeypatch.setattr(implementations, "_from_environment", "pallas")
    assert chosen()["tpu"] == "pallas"
    with jact_kernels.use_implementation("xla"):
        assert chosen()["tpu"] == "xla"
        assert chosen(implementation="pallas")["tpu"] == "pallas"
        with jact_kernels.use_implementation(None):
            assert chosen()["tpu"] == "pallas"
    monkeypatch.setattr(implementations, "_from_environment", "cuda")
    with pytest.raises(ValueError, match="JACT_KERNELS must be one of .*, got 'cuda'"):
        chosen()
    with (
        pytest.raises(ValueError, match="one of .*'pallas'.*, got 'mosaic'"),
        jact_kernels.use_implementation("mosaic"),
    ):
        pass


def test_automatic_choice_may_differ_by_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "AUTOMATIC", {("quantize", "tpu"): "pallas"})
    assert chosen() == {"cpu": "xla", "cuda": "xla", "tpu": "pallas"}
    assert set(chosen("dequantize").values()) == {"xla"}


def test_a_jitted_function_is_traced_anew_under_another_choice(x: jax.Array) -> None:
    """What was traced under one choice must not serve another, nor be lost."""
    traces = 0

    @jax.jit
    def encode(x: jax.Array) -> Any:
        nonlocal traces
        traces += 1
        return jact_kernels.quantize(x, bits=4)

    def kernel_is_in_the_tpu_program() -> bool:
        return "tpu_custom_call" in encode.trace(x).lower(lowering_platforms=("tpu",)).as_text()

    for _ in range(2):
        assert not kernel_is_in_the_tpu_program()
        with jact_kernels.use_implementation("pallas"):
            assert kernel_is_in_the_tpu_program()
    assert traces == 2


def programs(x: jax.Array) -> Iterator[tuple[Callable[..., Any], tuple[jax.Array, ...]]]:
    """Functions of arrays that call each operation with Pallas."""
    options: dict[str, Any] = {"bits": 4, "implementation": "pallas"}
    code = jact_kernels.quantize(x, bits=4)
    yield functools.partial(jact_kernels.quantize, **options), (x,)
    yield (
        functools.partial(jact_kernels.dequantize, shape=x.shape, dtype=x.dtype, **options),
        code,
    )


@pytest.mark.oldest
def test_on_a_cpu_nothing_of_the_choice_is_left(x: jax.Array) -> None:
    for call, arrays in programs(x):
        plain = functools.partial(call, implementation="xla")
        texts = [jax.jit(f).lower(*arrays).compile().as_text() for f in (call, plain)]
        assert all("conditional" not in text for text in texts)
        counts = [text.count(" fusion(") for text in texts]
        assert counts[0] == counts[1]
        jax.tree.map(assert_equal, jax.jit(call)(*arrays), jax.jit(plain)(*arrays))


def test_transformations_with_a_kernel_chosen(x: jax.Array) -> None:
    """Both branches are traced, batched and looped over, though a CPU takes XLA's."""
    encode = functools.partial(jact_kernels.quantize, bits=4, implementation="pallas")
    plain = functools.partial(jact_kernels.quantize, bits=4, implementation="xla")
    stacked = jnp.stack([x, x + x])
    batched = jax.jit(jax.vmap(encode))(stacked)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, encode(row)), None, stacked)
    expected = jax.jit(jax.vmap(plain))(stacked)
    jax.tree.map(assert_equal, batched, expected)
    jax.tree.map(assert_equal, scanned, expected)


def test_inside_shard_map_xla_is_taken(x: jax.Array) -> None:
    """A kernel does not say along which axes of a mesh its results vary, which is checked there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    encode = functools.partial(jact_kernels.quantize, bits=4, implementation="pallas")
    sharded = jax.jit(jax.shard_map(encode, mesh=mesh, in_specs=spec, out_specs=spec))
    text = sharded.trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in text
    rows = [encode(row) for row in jnp.split(x, 2)]
    expected = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
    jax.tree.map(assert_equal, sharded(x), expected)


@pytest.mark.oldest
def test_unsupported_arrays_fall_back(x: jax.Array) -> None:
    few_columns = x[..., :6]
    encode = functools.partial(jact_kernels.quantize, bits=4, implementation="pallas")
    text = jax.jit(encode).trace(few_columns).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in text
    rows = jact_kernels.explain(few_columns.shape, implementation="pallas").rows
    reasons = {row.platform: row.reason for row in rows if row.operation == "quantize"}
    assert "columns" in reasons["tpu"] and "no compiler" in reasons["cpu"]


def test_explanation_is_a_table() -> None:
    text = str(jact_kernels.explain(implementation="pallas"))
    assert len(text.splitlines()) == len(implementations.OPERATIONS) * len(
        implementations.PLATFORMS
    )
    assert "quantize        tpu   pallas  asked for by the argument" in text


def test_every_automatic_choice_has_a_reason() -> None:
    rows = jact_kernels.explain((16, 512, 768)).rows
    assert {row.operation for row in rows} == set(implementations.OPERATIONS)
    assert all(row.reason for row in rows)
    # What cannot be quantised still has masks.
    assert {row.operation for row in jact_kernels.explain(()).rows} == {"pack_mask", "unpack_mask"}


def test_a_missing_or_broken_jax_triton_is_said_once(
    x: jax.Array, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "jax-triton 0 does not work with JAX"
    monkeypatch.setattr(compat, "_triton_problem", lambda: message)
    implementations._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            jact_kernels.quantize(x, bits=4, implementation="triton")
    assert [message in record.message for record in caplog.records] == [True]
    rows = jact_kernels.explain(implementation="triton").rows
    written = [row for row in rows if row.platform == "cuda" and "pool" not in row.operation]
    assert [row.reason for row in written[:4]] == [message] * 4


def test_triton_is_tried_rather_than_looked_up() -> None:
    """The check passes or fails by what jax-triton does, whatever its version."""
    problem = compat.problem("triton", "cuda")
    if importlib.util.find_spec("jax_triton") is None:
        assert problem is not None and "cannot be imported" in problem
    elif problem is not None:
        assert "does not work with JAX" in problem
    else:
        assert chosen(implementation="triton")["cuda"] == "triton"


def test_old_gpus_are_not_given_to_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        compute_capability = "8.0"

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device()])
    problem = compat.problem("pallas", "cuda")
    assert problem is not None
    if "lacks" not in problem:  # This JAX's Mosaic GPU is too old in any case.
        assert "needs compute capability 9.0" in problem
    assert chosen(implementation="pallas")["cuda"] == "xla"
