"""What a function needs in memory, as XLA's compiler lays it out.

XLA plans every buffer of a program when it compiles it, so the peak is known without running the
program and without allocating anything: for the device at hand, or for one that is not here.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jact.memory import assignment, targets
from jact.plan import NeverAdapts


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

    @property
    def total_bytes(self) -> int:
        """All that the program holds at once: arguments, other outputs and temporary buffers."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def collectives(self) -> dict[str, int]:
        """How many operations between devices the program has, by kind ("all-reduce", ...)."""
        return assignment.collectives(self._module)

    @property
    def kernels(self) -> dict[str, int]:
        """How many kernels the program launches, by what they are.

        Those of libraries and hand-written ones (`custom-call`) go by their own name, others by the
        name of XLA's operation; most are fusions. What a loop launches counts once.
        """
        return assignment.kernels(self._module)

    @property
    def _module(self) -> bytes:
        (module,) = self.compiled.runtime_executable().hlo_modules()  # type: ignore[union-attr]
        return module.as_serialized_hlo_module_proto()


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
            one of `jact.memory.TARGETS`: "h100", "h200", "a100", "b200", "t4", "l4", "rtx4090",
            "v5e", "v5p" or "v6e". These need the compiler that JAX's plugins hold (`pip install
            "jax[cuda12]"`, or `"jax[tpu]"`). One device is compiled for, and shardings are dropped;
            or several, as in "h100x8" and "v5e:2x4", and then an argument's `NamedSharding` holds,
            whatever its mesh is made of, and figures are those of each device. (A mesh that `fun`
            itself names must be `jact.memory.mesh(target, ...)`.) Set `JAX_PLATFORMS=cpu` on a
            machine without the device to keep JAX from looking for one and warning that there is
            none. `fun` must not ask which backend is the default: that is not the target.
        **kwargs: keyword arguments of `fun`; `target` cannot be among them.

    Returns:
        Bytes, after XLA's own buffer reuse; `analyze` gives more figures from the same compilation.

    Raises:
        ValueError: `target` is unknown.
        MissingPluginError: the target's compiler is not installed.
    """
    return analyze(fun, *args, target=target, **kwargs).temp_bytes


def analyze(
    fun: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
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
        compiler_options: as for `jax.stages.Lowered.compile`.
        **kwargs: as for `peak`; neither `target` nor `compiler_options` can be among them.

    Returns:
        The analysis of one compilation.

    Raises:
        ValueError: `target` is unknown.
        MissingPluginError: the target's compiler is not installed.
        RuntimeError: the backend does not say how much memory its programs need.
    """
    if target is not None:
        targets.devices(target)  # An unknown target is an error before anything is traced.
    start = time.perf_counter()
    options = None if compiler_options is None else dict(compiler_options)
    compiled = _lower(fun, args, kwargs, target).compile(compiler_options=options)
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
    target: str | None,
) -> jax.stages.Lowered:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: _place(leaf, target) for i, leaf in enumerate(leaves) if _is_array(leaf)}

    def merge(arrays: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        merged = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(treedef, merged)

    # A jitted function is lowered itself: it may donate arguments, which inside another jit is
    # ignored. Only its arguments say for which device, so without any it cannot be.
    # A controller's step has the same method.
    lower = getattr(fun, "lower", None)
    if lower is not None and arrays:
        args, kwargs = merge(arrays)
        return lower(*args, **kwargs)

    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = merge(arrays)
        return fun(*args, **kwargs)

    # Without arguments, the results say for which device; on several devices XLA chooses how they
    # are laid out.
    free = target is None or (arrays and len(targets.devices(target)) > 1)
    options: dict[str, Any] = {} if free else {"out_shardings": targets.sharding(target)}
    with warnings.catch_warnings():
        # This `jax.jit` is no training step of the user's.
        warnings.simplefilter("ignore", NeverAdapts)
        return jax.jit(call, **options).lower(arrays)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _place(leaf: Any, target: str | None) -> Any:
    """Replaces an array by its description on the target's devices."""
    if target is None:
        return leaf
    weak = getattr(leaf, "weak_type", False)
    where = targets.place(getattr(leaf, "sharding", None), target)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=weak)
