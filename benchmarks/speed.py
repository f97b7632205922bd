"""The kernels on a device: are they right, how fast are they, and what is that to a training step.

In this order, the most telling first, until the time is up; what is left out is said. On a GPU, the
whole takes about four minutes.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jact_kernels
from benchmarks import output
from benchmarks.models import MODELS
from benchmarks.operations import DTYPES, operations, result, usable
from benchmarks.options import Case
from jact_kernels.bench import Operation

MIB = 2**20
CHECKED_SHAPES = ((16, 64, 256), (8, 16, 16, 64), (3, 49, 256), (5, 17, 6))
TIMED_BYTES = {"cpu": (4 * MIB,), "gpu": (512 * MIB, 64 * MIB, 2048 * MIB)}
"""Of the input; all numbers of bits at the first size, four bits at the others."""

MODELS_TIMED = {
    "cpu": ("mlp", "convnet_small"),
    "gpu": ("transformer", "convnet", "resnet50"),
}
POLICIES = ("off", "int4", "remat", "int8", "int2")
SECONDS_PER_ROUND = 0.02
ROUNDS = 5


class Clock:
    """Says when no more runs are to begin, and counts what is left out."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def allows(self, what: str) -> bool:
        """Whether there is time for `what`; says so if not."""
        if time.monotonic() < self.end:
            return True
        output.announce(f"no time left for {what}")
        return False


def measure(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the results, one for each operation or model and implementation."""
    clock = Clock(chosen.seconds)
    size = "cpu" if jax.default_backend() == "cpu" else "gpu"
    if size == "cpu":
        output.announce("on a CPU: small sizes, whose times say nothing of a GPU")
    seed = time.time_ns() % 2**32
    output.announce(f"data from seed {seed}")
    yield from check(chosen, clock, seed)
    for nbytes, dtype in itertools.product(TIMED_BYTES[size], chosen.dtypes):
        options = argparse.Namespace(**vars(chosen))
        options.dtypes = (dtype,)
        if nbytes != TIMED_BYTES[size][0]:
            options.bits = tuple(bits for bits in chosen.bits if bits == "4")
        rows = nbytes // (512 * 1024 * jnp.dtype(DTYPES[dtype]).itemsize)
        for operation in operations((rows, 512, 1024), options):
            yield from timed(operation, chosen, clock)
    for model, policy in itertools.product(MODELS_TIMED[size], POLICIES):
        yield from stepped(model, policy, chosen, clock)


def platform() -> str:
    """JAX's name of the default device's platform, as kernels are chosen by."""
    name = jax.default_backend()
    return "cuda" if name == "gpu" else name


def check(chosen: argparse.Namespace, clock: Clock, seed: int) -> Iterator[dict[str, Any]]:
    """Yields whether each implementation gives, bit for bit, what plain JAX gives on the CPU."""
    equal: dict[tuple[str, str], bool] = {}
    for shape in CHECKED_SHAPES:
        for operation in operations(shape, chosen):
            if not clock.allows(f"checking {operation.name}, {operation.label}"):
                continue
            for name, same in compare(operation, chosen.implementations, seed):
                if not same:
                    output.announce(f"{operation.name}, {operation.label}: {name} DIFFERS")
                key = (operation.name, name)
                equal[key] = equal.get(key, True) and same
    for (operation_name, name), same in sorted(equal.items()):
        yield result(operation_name, "all that is asked for", name, platform(), equal=same)


def compare(operation: Operation, names: tuple[str, ...], seed: int) -> Iterator[tuple[str, bool]]:
    """Yields each implementation with whether it gives what plain JAX gives on the CPU."""
    cpu = jax.local_devices(backend="cpu")[0]
    arrays = [jax.device_put(array, cpu) for array in sample(operation, seed)]
    expected = jax.jit(functools.partial(operation.call, implementation="xla"))(*arrays)
    arrays = [jax.device_put(array, jax.devices()[0]) for array in arrays]
    for name in usable(operation, platform(), names):
        given = jax.jit(functools.partial(operation.call, implementation=name))(*arrays)
        pairs = zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True)
        same = equal_bits if operation.exact else equal_to_rounding
        yield name, all(same(*map(np.asarray, pair)) for pair in pairs)


def sample(operation: Operation, seed: int) -> list[np.ndarray]:
    """Random arguments for an operation: normal numbers, some of them far away, or random codes."""
    random = np.random.default_rng(seed)
    arrays = []
    for argument in operation.arguments:
        if jnp.issubdtype(argument.dtype, jnp.floating):
            values = random.normal(size=argument.shape)
            # Widths from 2**-20 to 2**20, one for each of the last axis.
            values = values * 2.0 ** random.integers(-20, 20, size=argument.shape[-1:])
            if operation.name == "dequantize":
                values = np.abs(values)
            arrays.append(np.asarray(values).astype(argument.dtype))
        else:
            levels = 2 if argument.dtype == bool else 2 ** jnp.iinfo(argument.dtype).bits
            codes = random.integers(0, levels, size=argument.shape)
            arrays.append(codes.astype(argument.dtype))
    return arrays


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same, of the same dtype; any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if jnp.issubdtype(a.dtype, jnp.floating):
        return np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)
    return np.array_equal(a.astype(np.uint8), b.astype(np.uint8))


def equal_to_rounding(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays differ by no more than a few roundings of their largest element."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b, epsilon = a.astype(np.float64), b.astype(np.float64), float(jnp.finfo(a.dtype).eps)
    return bool((np.abs(a - b) <= 4 * epsilon * np.abs(b).max()).all())


def timed(
    operation: Operation, chosen: argparse.Namespace, clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yields the time of each implementation, and how near it comes to copying as many bytes."""
    if not clock.allows(f"timing {operation.name}, {operation.label}"):
        return
    arrays = jax.jit(functools.partial(zeros_or_noise, operation))()
    copy_seconds = seconds_to_copy(operation.least_bytes)
    for name in usable(operation, platform(), chosen.implementations):
        seconds = seconds_of(functools.partial(operation.call, implementation=name), arrays)
        yield result(
            operation.name,
            operation.label,
            name,
            platform(),
            milliseconds=seconds * 1e3,
            copy_fraction=copy_seconds / seconds,
        )


def zeros_or_noise(operation: Operation) -> list[jax.Array]:
    """Arguments made on the device itself: normal numbers, or codes."""
    arrays = []
    for argument in operation.arguments:
        if jnp.issubdtype(argument.dtype, jnp.floating):
            arrays.append(jax.random.normal(jax.random.key(0), argument.shape, argument.dtype))
        else:
            arrays.append(jnp.ones(argument.shape, argument.dtype))
    return arrays


@functools.cache
def seconds_to_copy(nbytes: int) -> float:
    """The time to read one half of these bytes and to write the other."""
    words = jnp.zeros(nbytes // 8, jnp.int32)
    return seconds_of(lambda words: words + jnp.int32(1), [words])


def seconds_of(function: Callable[..., Any], arrays: list[jax.Array]) -> float:
    """The median time of one call, when calls follow each other without waiting."""
    compiled = jax.jit(function).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    calls, seconds = 1, []
    while len(seconds) < ROUNDS:
        start = time.perf_counter()
        for _ in range(calls):
            out = compiled(*arrays)
        jax.block_until_ready(out)
        elapsed = time.perf_counter() - start
        if elapsed < SECONDS_PER_ROUND and not seconds and calls < 1024:
            calls *= 2
        else:
            seconds.append(elapsed / calls)
    return statistics.median(seconds)


@functools.cache
def seconds_of_step(model: str, policy: str, implementation: str) -> float:
    """The time of one gradient of a model."""
    overrides = {"batch": MODELS[model].batch, "layers": MODELS[model].layers, "dtype": "f32"}
    case = Case(model, (policy,), overrides)
    with jact_kernels.use_implementation(implementation):
        return seconds_of(case.gradient(policy), list(case.task(policy).arguments()))


def stepped(
    model: str, policy: str, chosen: argparse.Namespace, clock: Clock
) -> Iterator[dict[str, Any]]:
    """Yields the time of one gradient with each implementation, where it makes a difference."""
    names = chosen.implementations if policy.startswith("int") else ("xla",)
    for name in names:
        if name != "xla" and not any(
            choice.implementation == name and choice.platform == platform()
            for choice in jact_kernels.explain(implementation=name).rows
        ):
            continue
        if not clock.allows(f"a step of {model} with {policy} and {name}"):
            continue
        output.announce(f"a step of {model} with {policy} and {name}")
        seconds = seconds_of_step(model, policy, name)
        ratio = seconds / seconds_of_step(model, "off", "xla")
        label = f"{policy}, {MODELS[model].layers} layers, batch {MODELS[model].batch}"
        yield result(model, label, name, platform(), milliseconds=seconds * 1e3, off_ratio=ratio)
