"""The kernels compile for devices that are not here, and move no byte more than they must."""

import functools
import importlib
import importlib.util
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import operations, speed
from benchmarks.kernels import compiled
from benchmarks.operations import usable
from benchmarks.traffic import traffic
from jact.memory import targets
from jact_kernels import compat
from jact_kernels.bench import Operation
from jact_kernels.mask import bench as mask
from jact_kernels.pool import bench as pool
from jact_kernels.quantize import bench as quantize
from tests.kernels import triton_on_cpu

SHAPE = (512, 512, 768)
"""Larger, even as a mask, than what a TPU keeps on its chip."""


def target(name: str) -> object:
    missing = not targets._has_compiler(targets.TARGETS[name].platform)
    reason = f"the {targets.TARGETS[name].platform} plugin is missing"
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


TARGETS = [target("h100"), target("v5e")]


def named(name: str, dtype: str, bits: int, shape: tuple[int, ...] = SHAPE) -> Operation:
    every = itertools.chain(
        quantize.operations(shape, dtype, bits or 8),
        mask.operations(shape),
        pool.operations(shape, dtype),
    )
    return next(operation for operation in every if operation.name == name)


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        *itertools.product(("quantize", "dequantize"), ("float32", "bfloat16"), (4, 8)),
        ("quantize", "bfloat16", 1),
        ("dequantize", "bfloat16", 1),
        ("quantize", "bfloat16", 2),
        ("dequantize", "float32", 2),
        ("average_pool", "float32", 0),
        ("average_pool", "bfloat16", 0),
    ],
)
@pytest.mark.parametrize("where", TARGETS)
def test_pallas_moves_the_least_bytes(where: str, name: str, dtype: str, bits: int) -> None:
    measured = named(name, dtype, bits)
    platform = targets.TARGETS[where].platform
    if (problem := compat.problem("pallas", platform)) is not None:
        pytest.skip(problem)
    if not list(usable(measured, platform, ("pallas",))):
        # Everything else must be taken.
        assert (where, name) == ("h100", "average_pool")
        return
    row = compiled(measured, "pallas", where)
    # A second one on the chip, where it costs nothing, gives packed bits another layout.
    assert row["kernels"] <= (2 if where == "v5e" and bits in (1, 2) else 1)
    # The seed is read, too, on a TPU by way of a copy.
    assert 1 <= row["ratio"] <= 1.00001
    assert row["scratch_bytes"] <= 4096


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize(
    ("name", "bits", "least", "most"),
    [
        ("quantize", 4, 1.7, {"h100": 2.1, "v5e": 2.8}),
        ("dequantize", 4, 1, 1.01),
        *(("quantize", bits, 1.8, {"h100": 2.3, "v5e": 3.8}) for bits in (1, 2)),
        *(("dequantize", bits, 1, 1.01) for bits in (1, 2)),
        ("pack_mask", 0, 1, 1),
        ("unpack_mask", 0, 1, 1),
        ("average_pool", 0, 1, {"h100": 1, "v5e": 3.7}),
        ("repeat_windows", 0, 1, {"h100": 1, "v5e": 1.0001}),
    ],
)
def test_what_xla_moves(where: str, name: str, bits: int, least: float, most: Any) -> None:
    """The evidence for what "auto" takes, as docs/kernels.md states it."""
    most = most[where] if isinstance(most, dict) else most
    for dtype in ("float32", "bfloat16"):
        row = compiled(named(name, dtype, bits), "xla", where)
        assert least <= row["ratio"] <= most


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize("name", ["average_pool", "repeat_windows"])
def test_xla_pools_images_with_the_least_bytes(where: str, name: str) -> None:
    """Which is why no kernel takes them."""
    for shape in ((512, 32, 32, 64), (128, 14, 14, 1024), (64, 33, 33, 64)):
        row = compiled(named(name, "bfloat16", 0, shape), "xla", where)
        # What each row of a short window counts for is read, too.
        assert 1 <= row["ratio"] < 1.0001 and row["kernels"] == 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("arch", [80, 90])
def test_triton_compiles_to_cubin(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Said explicitly, as Triton warns that the default will change; results do not depend on it.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    codes = importlib.import_module("jact_kernels.quantize.triton_gpu")
    masks = importlib.import_module("jact_kernels.mask.triton_gpu")
    cases = [
        (masks.pack_kernel, {"mask": "*i1", "packed": "*u8"}, masks._constants(SHAPE)),
        (masks.unpack_kernel, {"packed": "*u8", "mask": "*i1"}, masks._constants(SHAPE)),
    ]
    ends = {"codes": "*u8", "low_end": "*bf16", "step_end": "*bf16"}
    for bits, kind in [(8, "fp32"), (4, "bf16"), (2, "fp16"), (1, "fp32")]:
        scheme = named("quantize", "float32", bits).case["scheme"]
        assert codes.unsupported(scheme, jnp.float32) is None
        sizes = codes._constants(scheme)
        types = {"x": f"*{kind}", **ends}
        encode = ({"seed": "*u32", **types}, {"STOCHASTIC": True, **sizes})
        cases.append((codes.quantize_kernel, *encode))
        cases.append((codes.dequantize_kernel, types, {"LIMIT": 32752.0, **sizes}))
    for kernel, types, constants in cases:
        binary = triton_on_cpu.compile_to_cubin(kernel, types, constants, arch)
        assert len(binary.asm["cubin"]) > 1000
        # The whole pass is in one kernel, and its tile fits any GPU since Ampere.
        assert binary.metadata.shared <= 48 * 1024


PROGRAM = """
%fused (p: f32[4,6]) -> f32[6] {
  ROOT %r = f32[6]{0} reduce(%p)
}

ENTRY %main (x: f32[4,6]) -> (u4[4,6], f32[6]) {
  %x = f32[4,6]{1,0} parameter(0), metadata={op_name="x"}
  %reduce = (f32[6]{0}, pred[3]{0}) fusion(%x), kind=kInput, calls=%fused
  %low = f32[6]{0} get-tuple-element(%reduce), index=0
  %seen = bf16[4,6]{1,0:T(8,128)(2,1)S(1)} fusion(%x, /*index=1*/%low), kind=kLoop, calls=%fused
  %copy-start = (f32[4,6]{1,0:S(1)}, f32[4,6]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = f32[4,6]{1,0:S(1)} copy-done(%copy-start)
  %codes = u4[4,6]{1,0:E(4)} custom-call(%copy-done, %seen, %low, %low), api="f(x)"
  ROOT %t = (u4[4,6]{1,0:E(4)}, f32[6]{0}) tuple(%codes, %low)
}
"""


def test_traffic() -> None:
    counted = traffic(PROGRAM)
    reduction, seen = (96 + 24 + 3), (96 + 24)  # What is on the chip costs nothing.
    start, codes = 96, (24 + 12)  # An operand is read once, however often it is named.
    assert counted.bytes == reduction + seen + start + codes
    assert counted.kernels == 3


def test_traffic_of_a_compiled_program() -> None:
    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    text = jax.jit(lambda x: jnp.tanh(x) * x).lower(x).compile().as_text()
    assert traffic(text).bytes == 2 * 128 * 256 * 4
    assert traffic(text).kernels == 1


def test_the_device_script_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of `python -m benchmarks kernels`, at sizes that take no time."""
    operations.announce_once.cache_clear()
    monkeypatch.setattr(speed, "CHECKED_SHAPES", ((3, 16, 6),))
    monkeypatch.setattr(speed, "TIMED_BYTES", {"cpu": (2**21,)})
    monkeypatch.setattr(speed, "MODELS_TIMED", {"cpu": ("mlp",)})
    monkeypatch.setattr(speed, "POLICIES", ("off", "int4"))
    monkeypatch.setattr(speed, "SECONDS_PER_ROUND", 0.0)
    command.main(["kernels", "--dtypes", "bf16", "--bits", "4"])
    out, err = capsys.readouterr()
    assert "quantize not with pallas: pallas has no compiler for cpu" in err
    assert "say nothing of a GPU" in err
    for name in ("dequantize", "unpack_mask", "mlp"):
        assert name in out
    assert "yes" in out and "NO" not in out


def test_the_device_script_sees_differences(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that gives anything else is reported."""
    right = named("dequantize", "float32", 8, (2, 16, 6))
    wrong = Operation(
        name=right.name,
        label=right.label,
        # Off by one in the last place, on every other call: on the device, not on the CPU.
        call=functools.partial(_alternating, iter((0, 1)), right.call),
        arguments=right.arguments,
        least_bytes=right.least_bytes,
        case=right.case,
    )
    assert list(speed.compare(right, ("xla",), seed=0)) == [("xla", True)]
    assert list(speed.compare(wrong, ("xla",), seed=0)) == [("xla", False)]


def _alternating(shifts, call, *arrays, **options):
    values = call(*arrays, **options)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32) + jnp.int32(next(shifts))
    return jax.lax.bitcast_convert_type(bits, values.dtype)


def test_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert speed.Clock(60).allows("anything")
    assert not speed.Clock(-1).allows("timing the end of time")
    assert "no time left for timing the end of time" in capsys.readouterr().err


@pytest.mark.parametrize("where", TARGETS)
def test_the_command_reports_a_target(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.kernels.SHAPES", ((256, 512, 768),))
    operations.announce_once.cache_clear()
    command.main(["kernels", "--target", where, "--dtypes", "f32", "--bits", "4"])
    out, err = capsys.readouterr()
    assert f"kernels, {where}" in out and "pallas" in out
    assert "pack_mask not with pallas: no pallas kernel is written for it" in err
