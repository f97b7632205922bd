"""The only place that touches what differs between JAX versions, or what may not be installed."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval


def problem(implementation: str, platform: str) -> str | None:
    """Why kernels written for a platform in one of these ways cannot run, or None if they can.

    Args:
      implementation: "pallas" or "triton".
      platform: "cuda" or "tpu".
    """
    if implementation == "triton":
        return _triton_problem()
    try:
        if platform == "tpu":
            mosaic_tpu()
            return None
        mosaic_gpu()
    except ImportError as error:
        return f"JAX {jax.__version__} cannot: {error}"
    return _gpu_problem()


def is_varying(array: Any) -> bool:
    """Whether `shard_map` tracks along which axes of its mesh an array varies."""
    return bool(jax.typeof(array).manual_axis_type.varying)


def num_devices(context: Any) -> int:
    """How many devices the program that is being lowered is for."""
    axes = context.module_context.axis_context
    return axes.mesh.size if hasattr(axes, "mesh") else getattr(axes, "num_devices", 1)


def is_divided(aval: Any) -> bool:
    """Whether a type says that an array is divided along an explicit axis of a mesh."""
    return any(part is not None for part in aval.sharding.spec)


def by_devices(
    x: jax.Array,
    *,
    one: Callable[[jax.Array], jax.Array],
    several: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Applies one function where the program is for one device, and else another.

    Only when a program is lowered is it known how many there are.

    Args:
      x: an array of integers or booleans; or another, which no derivative is wanted of.
      one: for one device.
      several: the same function, in a way that can be divided among devices.
    """
    return _by_devices.bind(x, one=one, several=several)


_by_devices = Primitive("jact_by_devices")


def _lower_by_devices(context: Any, x: Any, *, one: Any, several: Any) -> Any:
    alone = num_devices(context) == 1 and not is_divided(context.avals_in[0])
    fun = one if alone else several
    return mlir.lower_fun(fun, multiple_results=False)(context, x)


def _map_by_devices(args: Any, axes: Any, *, one: Any, several: Any) -> Any:
    (x,), (axis,) = args, axes
    return by_devices(x, one=jax.vmap(one, axis), several=jax.vmap(several, axis)), 0


_by_devices.def_impl(lambda x, **ways: jax.jit(functools.partial(by_devices, **ways))(x))
_by_devices.def_abstract_eval(
    lambda aval, *, one, several: jax.make_jaxpr(several)(aval).out_avals[0]
)
mlir.register_lowering(_by_devices, _lower_by_devices)
batching.primitive_batchers[_by_devices] = _map_by_devices


@functools.cache
def mosaic_gpu() -> Any:
    """The module of Pallas that programs NVIDIA GPUs.

    Raises:
      ImportError: this JAX has none, or one with another interface.
    """
    module = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    names = ("kernel", "load", "store", "broadcasted_iota", "Layout", "LoweringSemantics")
    if missing := [name for name in names if not hasattr(module, name)]:
        raise ImportError(f"its Mosaic GPU lacks {', '.join(missing)}")
    return module


def mosaic_gpu_kernel(
    body: Callable[..., None], *, name: str, interpret: bool, **options: Any
) -> Callable[..., Any]:
    """A Mosaic GPU kernel whose threads share nothing, so that none waits for another."""
    plgpu = mosaic_gpu()
    params = plgpu.CompilerParams(
        unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
    )
    return plgpu.kernel(
        body,
        compiler_params=params,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
        **options,
    )


@functools.cache
def mosaic_tpu() -> tuple[Any, Any]:
    """Pallas, and its module that programs TPUs."""
    names = ("jax.experimental.pallas", "jax.experimental.pallas.tpu")
    pallas, tpu = (importlib.import_module(name) for name in names)
    return pallas, tpu


def triton_call(*arrays: Any, **options: Any) -> Any:
    """Calls a Triton kernel from JAX; under `vmap`, once for each example."""
    call = importlib.import_module("jax_triton").triton_call
    return jax.custom_batching.sequential_vmap(functools.partial(call, **options))(*arrays)


def _gpu_problem() -> str | None:
    """Why Mosaic GPU cannot compile for the GPUs of this machine, if there are any.

    It would not raise but end the process, where it meets a GPU without the instructions it uses.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    for device in devices:
        capability = getattr(device, "compute_capability", "9.0")
        if float(capability) < 9:
            return f"Mosaic GPU needs compute capability 9.0 (Hopper), {device} has {capability}"
    return None


@functools.cache
def _triton_problem() -> str | None:
    """Tries what fails where jax-triton is older than the JAX it meets: tracing, then pruning."""
    try:
        module = importlib.import_module("jax_triton")
    except ImportError as error:
        return f"jax-triton cannot be imported ({error}); pip install jax-triton"
    kernel = importlib.import_module("jact_kernels.mask.triton_gpu").pack_kernel
    out_type = jax.ShapeDtypeStruct((8,), "uint8")
    sizes = {"OUTER": 1, "LENGTH": 64, "INNER": 1, "BLOCK": 8}
    call = functools.partial(module.triton_call, kernel=kernel, out_type=out_type, grid=1, **sizes)
    try:
        jaxpr = jax.make_jaxpr(call)(jax.ShapeDtypeStruct((64,), bool)).jaxpr
        partial_eval.dce_jaxpr(jaxpr, [True])
    except Exception as error:  # Whatever it is, it would come up in the user's program.
        version = getattr(module, "__version__", "")
        return f"jax-triton {version} does not work with JAX {jax.__version__}: {error}"
    return None
