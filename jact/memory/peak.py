"""What a function needs in memory, as XLA's compiler lays it out.

XLA plans every buffer of a program when it compiles it, so the peak is known without running the
program and without allocating anything: for the device at hand, or for one that is not here.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jact.memory import targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryAnalysis:
    """The memory of one compiled program on one device.

    Attributes:
        temp_bytes: peak of the temporary buffers: all that the program holds at once beyond its
            arguments and outputs. For a gradient, the activations are here.
        argument_bytes: size of the arguments.
        output_bytes: size of the outputs.
        alias_bytes: the part of the outputs that lies in donated arguments.
        host_temp_bytes: peak of the temporary buffers in host memory (offloaded arrays). A CPU has
            no other memory than the host's and reports 0. Elsewhere, 0 for a program that offloads
            says that the compiler dropped the transfers: XLA for GPUs does so outside of loops.
        compile_seconds: time to trace, lower and compile.
        compiled: the program, for its text (`as_text`) and cost (`cost_analysis`). Arguments that
            are not arrays may be compiled in, so its signature need not be the function's.
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    host_temp_bytes: int
    compile_seconds: float
    compiled: jax.stages.Compiled = dataclasses.field(repr=False, compare=False)


def peak(fun: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> int:
    """Returns the peak temporary memory of a compiled function, in bytes.

    This is what training needs on top of parameters, optimizer state and gradients. Nothing is run,
    and for a `target` nothing is allocated.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jact.memory
        >>> x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        >>> def loss(x):
        ...     return jnp.sum(jnp.tanh(x @ x))
        >>> jact.memory.peak(jax.grad(loss), x) >= x.size * 4
        True

    Args:
        fun: the function, usually a gradient or a whole training step, jitted or not.
        *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`. Whatever else they
            contain (Python numbers, strings, functions) is a constant, unless `fun` is already
            jitted: then `jax.jit` decides.
        target: the device to compile for: None (JAX's default backend), or, without that device,
            "h100", "a100", "t4" or "v5e". These need the compiler that JAX's plugins hold
            (`pip install "jact-jax[cuda12]"`, or `[tpu]`); shardings are dropped and one device of
            the target is compiled for. Set `JAX_PLATFORMS=cpu` on a machine without the device to
            keep JAX from looking for one and warning that there is none. `fun` must not ask which
            backend is the default: that is not the target.
        **kwargs: keyword arguments of `fun`; `target` cannot be among them.

    Returns:
        Bytes, after XLA's own buffer reuse; `analyze` gives more figures from the same compilation.

    Raises:
        ValueError: `target` is unknown.
        MissingPluginError: the target's compiler is not installed.
    """
    return analyze(fun, *args, target=target, **kwargs).temp_bytes


def analyze(
    fun: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> MemoryAnalysis:
    """Compiles a function and returns the memory it needs and the time that compiling took.

    Example:
        >>> import jax.numpy as jnp
        >>> import jact.memory
        >>> analysis = jact.memory.analyze(jnp.sin, jnp.zeros(1024))
        >>> analysis.argument_bytes, analysis.output_bytes
        (4096, 4096)

    Args:
        fun: as for `peak`.
        *args: as for `peak`.
        target: as for `peak`.
        **kwargs: as for `peak`.

    Returns:
        The analysis of one compilation.

    Raises:
        ValueError: `target` is unknown.
        MissingPluginError: the target's compiler is not installed.
        RuntimeError: the backend does not say how much memory its programs need.
    """
    where = None if target is None else targets.sharding(target)
    start = time.perf_counter()
    compiled = _lower(fun, args, kwargs, where).compile()
    seconds = time.perf_counter() - start
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError(
            f"the backend of target={target!r} gives no memory analysis of its programs."
        )
    return MemoryAnalysis(
        temp_bytes=stats.temp_size_in_bytes,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
        compile_seconds=seconds,
        compiled=compiled,
    )


def _lower(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: jax.sharding.Sharding | None,
) -> jax.stages.Lowered:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: _place(leaf, where) for i, leaf in enumerate(leaves) if _is_array(leaf)}

    def merge(arrays: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        merged = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(treedef, merged)

    # A jitted function is lowered itself: it may donate arguments, which inside another jit is
    # ignored. Only its arguments say for which device, so without any it cannot be.
    if isinstance(fun, jax.stages.Wrapped) and arrays:
        args, kwargs = merge(arrays)
        return fun.lower(*args, **kwargs)

    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = merge(arrays)
        return fun(*args, **kwargs)

    jitted = jax.jit(call) if where is None else jax.jit(call, out_shardings=where)
    return jitted.lower(arrays)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _place(leaf: Any, where: jax.sharding.Sharding | None) -> Any:
    """Replaces an array by its description on the target's device."""
    if where is None:
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=weak)
