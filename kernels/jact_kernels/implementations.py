"""The choice among a kernel's implementations: per operation, shape and platform, with its reasons.

Which device a program will run on is not known when it is traced, as it may be compiled for
another one. So the choice is made for every platform, and `jax.lax.platform_dependent` keeps the
one that the program is lowered for; the others leave no trace in it.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import lax

from jact_kernels import compat

NAMES = ("auto", "xla", "pallas", "triton")
PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms that choices are made for. Any other, such as ROCm, takes XLA."""

VARIABLE = "JACT_KERNELS"
"""The environment variable that names the implementation, read on import."""

OPERATIONS: Mapping[str, str] = {
    "quantize": "quantize",
    "dequantize": "quantize",
    "pack_mask": "mask",
    "unpack_mask": "mask",
    "average_pool": "pool",
    "repeat_windows": "pool",
}
"""The folder of each operation."""

MODULES: Mapping[tuple[str, str], str] = {
    ("pallas", "cuda"): "pallas_gpu",
    ("pallas", "tpu"): "pallas_tpu",
    ("triton", "cuda"): "triton_gpu",
}
"""The file, in the folder of an operation, of what is written for a platform."""

AUTOMATIC: Mapping[tuple[str, str], str] = {}
"""What "auto" takes, by operation and platform, where it is not XLA.

A kernel belongs here once `python -m benchmarks kernels` has passed on that platform and found it
faster. None has run on a device yet, so all that is known are the bytes that each moves; see
docs/kernels.md.
"""

_LEAST_BYTES = "XLA's one fused kernel already moves the least bytes possible"
_UNTRIED = (
    "XLA reads the input twice and Pallas once, but that kernel has not run on a device yet, "
    "and a sharded program cannot be partitioned through it"
)
_WHY_XLA: Mapping[tuple[str, str], str] = {
    ("quantize", "cuda"): _UNTRIED,
    ("quantize", "tpu"): _UNTRIED,
    ("dequantize", "cuda"): _LEAST_BYTES,
    ("dequantize", "tpu"): _LEAST_BYTES,
    ("pack_mask", "cuda"): _LEAST_BYTES,
    ("pack_mask", "tpu"): _LEAST_BYTES,
    ("unpack_mask", "cuda"): _LEAST_BYTES,
    ("unpack_mask", "tpu"): _LEAST_BYTES,
    ("average_pool", "cuda"): _LEAST_BYTES,
    ("average_pool", "tpu"): (
        f"in images {_LEAST_BYTES}; in sequences Pallas does, but that kernel has not run on a "
        "device yet"
    ),
    ("repeat_windows", "cuda"): _LEAST_BYTES,
    ("repeat_windows", "tpu"): _LEAST_BYTES,
}

_logger = logging.getLogger(__name__)
# Part of `jax.jit`'s cache keys, so that what was traced under one choice does not serve another.
_context = jax.make_user_context(None)
_from_environment = os.environ.get(VARIABLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which implementation an operation takes on a platform, and why.

    Attributes:
      operation: the name of the function, such as "quantize".
      platform: JAX's name of the platform.
      implementation: "xla", "pallas" or "triton".
      reason: why this one; for XLA, why not the one that was asked for.
      module: the module of the kernel; empty for XLA.
    """

    operation: str
    platform: str
    implementation: str
    reason: str
    module: str = ""


def check_implementation(implementation: str | None) -> None:
    """Checks the name of an implementation.

    Args:
      implementation: None (as the context or the environment say), "auto" (the best one for the
        device), "xla" (plain JAX), "pallas" or "triton".

    Raises:
      ValueError: the name is not one of these.

    Example:
      >>> from jact_kernels.implementations import check_implementation
      >>> check_implementation("xla")
    """
    if implementation is not None and implementation not in NAMES:
        raise ValueError(f"implementation must be one of {(None, *NAMES)}, got {implementation!r}")


@contextlib.contextmanager
def use_implementation(implementation: str | None) -> Iterator[None]:
    """Sets the implementation of kernels traced inside, unless their argument names another.

    It is part of the cache keys of `jax.jit`: a jitted function is traced anew under another
    choice, and what was compiled under the earlier one is kept.

    Args:
      implementation: None or one of "auto", "xla", "pallas" and "triton".

    Raises:
      ValueError: the name is not one of these.

    Example:
      >>> import jax.numpy as jnp
      >>> import jact_kernels
      >>> with jact_kernels.use_implementation("xla"):
      ...     packed = jact_kernels.pack_mask(jnp.ones(16, bool))
      >>> packed.tolist()
      [255, 255]
    """
    check_implementation(implementation)
    with _context(implementation):
        yield


def requested(implementation: str | None = None) -> tuple[str, str]:
    """The name of the implementation that is asked for, and by what.

    Args:
      implementation: the argument of the operation; it wins over the context, which wins over the
        environment.
    """
    asked = (
        (implementation, "the argument"),
        (_context.value, "use_implementation"),
        (_from_environment, VARIABLE),
    )
    for name, source in asked:
        if name is not None:
            if name not in NAMES:
                raise ValueError(f"{source} must be one of {NAMES}, got {name!r}")
            return name, source
    return "auto", "default"


def select(
    operation: str, implementation: str | None, case: Mapping[str, Any] | None = None
) -> tuple[Choice, ...]:
    """Chooses an implementation of an operation for every platform.

    Args:
      operation: one of `OPERATIONS`.
      implementation: the argument of the operation, or None.
      case: what a kernel's `unsupported` is asked about; None leaves shapes out of account.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_implementation(implementation)
    name, source = requested(implementation)
    return tuple(_choose(operation, platform, name, source, case) for platform in PLATFORMS)


def run(
    choices: tuple[Choice, ...], reference: Callable[..., Any], *arrays: Any, **static: Any
) -> Any:
    """Runs the implementation that was chosen for the platform that is lowered for.

    Args:
      choices: what `select` returned.
      reference: the operation in plain JAX, a function of the arrays alone.
      *arrays: the operation's arrays.
      **static: the other arguments of the kernels, as hashable Python values.
    """
    kernels = {
        choice.platform: functools.partial(_jitted(choice, tuple(static)), **static)
        for choice in choices
        if choice.implementation != "xla"
    }
    # A kernel does not say along which axes of a mesh its results vary, which `shard_map` checks.
    if not kernels or any(map(compat.is_varying, arrays)):
        return reference(*arrays)
    return lax.platform_dependent(*arrays, default=reference, **kernels)


def _choose(
    operation: str, platform: str, name: str, source: str, case: Mapping[str, Any] | None
) -> Choice:
    def xla(reason: str) -> Choice:
        return Choice(operation=operation, platform=platform, implementation="xla", reason=reason)

    reason = f"asked for by {source}"
    if name == "auto":
        name = AUTOMATIC.get((operation, platform), "xla")
        reason = _WHY_XLA.get((operation, platform), "there are no kernels for this platform")
        if name != "xla":
            reason = "measured to be the fastest"
    if name == "xla":
        return xla(reason)
    if (name, platform) not in MODULES:
        return xla(f"{name} has no compiler for {platform}")
    module = f"{__package__}.{OPERATIONS[operation]}.{MODULES[name, platform]}"
    unwritten = f"no {name} kernel is written for it: {_WHY_XLA[operation, platform]}"
    if importlib.util.find_spec(module) is None:
        return xla(unwritten)
    if (problem := compat.problem(name, platform)) is not None:
        _warn_once(f"jact_kernels falls back from {name} to XLA on {platform}: {problem}")
        return xla(problem)
    kernels = importlib.import_module(module)
    if not hasattr(kernels, operation):
        return xla(unwritten)
    if case is not None:
        problem = kernels.unsupported(**case)
        if problem is not None:
            return xla(problem)
    return Choice(
        operation=operation, platform=platform, implementation=name, reason=reason, module=module
    )


@functools.cache
def _jitted(choice: Choice, static: tuple[str, ...]) -> Callable[..., Any]:
    """The kernel under `jit`, so that equal shapes share one trace."""
    kernel = getattr(importlib.import_module(choice.module), choice.operation)
    return jax.jit(kernel, static_argnames=static)


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)
