"""The only place that touches what differs between JAX versions, or what JAX does not promise.

Everything else in jact is written against `jax`, `jax.extend` and `jax.custom_derivatives`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.api_util import shaped_abstractify
from jax.core import Tracer
from jax.extend import core as jex
from jax.extend import linear_util, source_info_util
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import ad, batching, mlir, partial_eval

from jact_kernels.compat import is_divided, num_devices

#: Names under which JAX has called the equation of a nested `jax.jit`.
JIT_PRIMITIVES = frozenset({"jit", "pjit"})
#: Names under which JAX has called the equation of a jaxpr applied as it is.
CLOSED_CALL_PRIMITIVES = frozenset({closed_call_p.name, "closed_call", "core_closed_call"})


def _folder(package: str) -> str:
    """Where a package is installed; it is not imported, as a user may do without it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return f"{pathlib.Path(spec.origin).parent}/"


#: Frames of files in these folders are never the line a user wrote.
LIBRARY_FOLDERS = (
    *map(_folder, ("jact", "jact_kernels", "jax", "flax", "optax")),
    "<frozen",
)


# From JAX 0.12 on, a closed jaxpr is a jaxpr that holds its constants.
_ClosedJaxpr: Any = getattr(jex, "ClosedJaxpr", jex.Jaxpr)


def call_jaxpr(closed: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Applies a closed jaxpr to other constants and arguments, as one equation.

    Under a trace it costs the same however large the jaxpr is; outside it runs operation by
    operation. Lowering inlines it.
    """
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    # What the inputs were called is known for the arguments alone.
    names = jaxpr.debug_info.with_unknown_names()
    call = _ClosedJaxpr(jaxpr.replace(constvars=[], invars=inputs, debug_info=names), [])
    return list(closed_call_p.bind(*consts, *args, call_jaxpr=call))


def trace(
    fun: Callable[..., Sequence[Any]],
    types: Sequence[Any],
    name: str,
    argument_names: Sequence[str] | None = None,
) -> Any:
    """Traces a flat function, as `jax.make_jaxpr` does, in a tenth of the time.

    Pytrees, shardings and layouts, which `jax.make_jaxpr` settles as for `jax.jit`, can take longer
    than the tracing of a small block.

    Args:
        fun: takes arrays, and returns a sequence of arrays.
        types: its arguments' types.
        name: what the user calls the function, for messages.
        argument_names: what the user calls its arguments; None if that is not known.

    Returns:
        The closed jaxpr; what `fun` closes over are its constants.
    """
    avals = [shaped_abstractify(t) for t in types]
    names = None if argument_names is None else tuple(argument_names)
    wrapped = linear_util.wrap_init(fun, debug_info=jex.DebugInfo("jact", name, names, None))
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, avals)
    return _ClosedJaxpr(jaxpr, consts)


def custom_vjp(
    fun: Callable[..., list[Any]],
    forward: Callable[..., tuple[list[Any], Any]],
    backward: Callable[..., tuple[Any, ...]],
    name: str,
) -> Callable[..., list[Any]]:
    """`jax.custom_vjp` of a flat function, without JAX's search for the names of its arguments.

    Args:
        fun: takes arrays by position.
        forward: as for `defvjp`.
        backward: as for `defvjp`.
        name: what the user calls the function, for messages.
    """
    for function in (fun, forward, backward):
        function.__fun_debug_info__ = jex.DebugInfo("custom_vjp", name, None, None)  # pyright: ignore[reportFunctionMemberAccess]
    function = jax.custom_vjp(fun)
    function.defvjp(forward, backward)
    return function


def as_closed(jaxpr: Any) -> Any:
    """A closed jaxpr, from an open one without constants or from one that is closed already."""
    return jaxpr if hasattr(jaxpr, "consts") else _ClosedJaxpr(jaxpr, [])


def is_tracer(x: Any) -> bool:
    """Whether a value is one of some trace."""
    return isinstance(x, Tracer)


def any_tracer(tree: Any) -> bool:
    """Whether a pytree holds a value of some trace: of `jax.jit`, a derivative, a loop."""
    return any(map(is_tracer, jax.tree.leaves(tree)))


def any_staged(tree: Any) -> bool:
    """Whether a pytree holds a value of a program that is being made, for `jax.jit` say.

    What is differentiated or mapped outside of one (`jax.grad`, `jax.vmap`) runs as it is traced.
    """
    return any(_is_staged(_innermost(x)) for x in jax.tree.leaves(tree))


def _innermost(x: Any) -> Any:
    """What a value is under transformations that run as they trace, `jax.grad` and `jax.vmap`."""
    while is_tracer(x) and not _is_staged(x):
        inner = getattr(x, "primal", getattr(x, "val", None))
        if inner is None:
            break
        x = inner
    return x


def is_differentiated(x: Any) -> bool:
    """Whether a value is one that is being differentiated with respect to, or follows from one."""
    return type(x).__name__ in ("JVPTracer", "LinearizeTracer")


def is_argument(x: Any) -> bool:
    """Whether a value is an argument of the function that is being traced, for `jax.jit` say.

    It may be one that is being differentiated with respect to.
    """
    while is_differentiated(x):
        x = x.primal
    return _is_staged(x) and getattr(x, "parent", x) is None


def undifferentiated(values: Sequence[Any]) -> list[bool]:
    """For each value, whether it certainly plays no part in the derivative that is being taken.

    So it is with what belongs to a trace around the differentiation; of a trace inside of one (the
    body of a loop, say) nothing is certain. Without differentiation, nothing is either.
    """
    around: set[int] = set()
    for x in filter(is_differentiated, values):
        trace = getattr(x, "_trace", None)
        while trace is not None:
            trace = getattr(trace, "parent_trace", None)
            around.add(id(trace))
    return [
        bool(around) and (not is_tracer(x) or (_is_staged(x) and id(x._trace) in around))
        for x in values
    ]


def _is_staged(x: Any) -> bool:
    return type(x).__name__ == "DynamicJaxprTracer"


def equations(jaxpr: Any) -> list[Any]:
    """The equations of an open or closed jaxpr."""
    return list(getattr(jaxpr, "jaxpr", jaxpr).eqns)


def new_var(aval: Any) -> jex.Var:
    """A fresh variable of the type `aval`."""
    return jex.Var(aval)


def is_var(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a variable rather than a literal."""
    return isinstance(atom, jex.Var)


def is_drop_var(var: Any) -> bool:
    """Whether a variable is the `_` that receives an unused result."""
    return isinstance(var, jex.DropVar)


def inlined_source(source_info: Any, call: Any) -> Any:
    """The source of an equation that was inlined from a call: under its name scopes, at its line.

    JAX cuts tracebacks at the boundary of a nested `jit`, so inside the library's own jitted
    functions only the call knows the user's line.
    """
    scoped = source_info.replace(name_stack=call.name_stack + source_info.name_stack)
    return scoped if source_line(scoped) else scoped.replace(traceback=call.traceback)


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Restores the source line, name scopes and configuration an equation was traced under."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


@contextlib.contextmanager
def mesh_of(aval: Any) -> Iterator[None]:
    """Restores the mesh that a value was made under."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def bind_equation(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Applies an equation's primitive to new arguments; always returns a list of results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with equation_context(eqn):
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def name_scopes(source_info: Any) -> str:
    """The name stack of an equation, such as `jvp(Model)/Block_0`."""
    return str(source_info.name_stack)


def source_line(source_info: Any) -> str:
    """The user's line that made an equation, as `file.py:12 (function)`; empty when unknown."""
    traceback = source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(LIBRARY_FOLDERS):
            name = frame.file_name.rsplit("/", 1)[-1]
            return f"{name}:{frame.line_num} ({frame.function_name})"
    return ""


def jit_shardings(eqn: Any) -> tuple[list[Any], list[Any]] | None:
    """The shardings that a nested `jit` fixes for its arguments and its results, None for the rest.

    Returns:
        None in the place of both where more than that is fixed: a layout, a kind of memory, or a
        sharding over axes that are not automatic.
    """
    if any(layout is not None for f in ("in_layouts", "out_layouts") for layout in eqn.params[f]):
        return None
    shardings = [
        [None if type(s).__name__ == "UnspecifiedValue" else s for s in eqn.params[field]]
        for field in ("in_shardings", "out_shardings")
    ]
    fixed = [s for side in shardings for s in side if s is not None]
    return (shardings[0], shardings[1]) if all(map(_is_ordinary, fixed)) else None


def _is_ordinary(sharding: Any) -> bool:
    return (
        isinstance(sharding, jax.sharding.NamedSharding)
        and sharding.memory_kind in (None, "device")
        and all(kind == jax.sharding.AxisType.Auto for kind in sharding.mesh.axis_types)
    )


def constrain_sharding(atom: Any, sharding: Any) -> Any:
    """An equation that gives a value a sharding; its result is a fresh variable."""

    def constrain(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding)

    (eqn,) = jax.make_jaxpr(constrain)(atom.aval).jaxpr.eqns
    return eqn.replace(invars=[atom], outvars=[new_var(atom.aval)])


def barrier[S, T](values: S, on_one_device: T, products: Sequence[Any] = ()) -> tuple[S, T]:
    """`lax.optimization_barrier` over both pytrees; over the first one alone on several devices.

    There, what is to be summed over devices would be summed by itself and at once, rather than
    together with its like.

    Args:
        values: waits everywhere.
        on_one_device: waits where there is one device.
        products: those of the arrays that are products of matrices. XLA computes them in two
            dimensions. On one device they wait in two as well: between a product and a barrier in
            more there is a reshape that no fusion takes in, and what reads the product next, with
            another layout than its own, cannot be written in its place.
    """
    arrays, tree = jax.tree.flatten((values, on_one_device))
    num_always = len(jax.tree.leaves(values))
    products = [x for x in products if x.ndim > 2 and not is_divided(jax.typeof(x))]
    flat = tuple(i for i, x in enumerate(arrays) if any(x is product for product in products))
    everywhere = num_always == len(arrays) and not flat
    if everywhere or any(is_ref(jax.typeof(x)) for x in arrays):
        return jax.lax.optimization_barrier((values, on_one_device))
    return jax.tree.unflatten(tree, _barrier.bind(*arrays, num_always=num_always, flat=flat))


_barrier = jex.Primitive("jact_barrier")
_barrier.multiple_results = True


def _apply_barrier(*arrays: Any, num_always: int, flat: tuple[int, ...]) -> Any:
    del num_always, flat
    return jax.lax.optimization_barrier(arrays)


def _lower_barrier(ctx: Any, *arrays: Any, num_always: int, flat: tuple[int, ...]) -> Any:
    one_device = num_devices(ctx) == 1

    def apply(*arrays: Any) -> list[Any]:
        if not one_device:
            return [*jax.lax.optimization_barrier(arrays[:num_always]), *arrays[num_always:]]
        waiting = list(arrays)
        for i in flat:
            waiting[i] = arrays[i].reshape(-1, arrays[i].shape[-1])
        held = jax.lax.optimization_barrier(waiting)
        return [x.reshape(array.shape) for x, array in zip(held, arrays, strict=True)]

    return mlir.lower_fun(apply, multiple_results=True)(ctx, *arrays)


_barrier.def_impl(_apply_barrier)
_barrier.def_abstract_eval(lambda *avals, **params: list(avals))
mlir.register_lowering(_barrier, _lower_barrier)
ad.primitive_jvps[_barrier] = lambda primals, tangents, **params: (
    _barrier.bind(*primals, **params),
    list(tangents),
)
batching.primitive_batchers[_barrier] = lambda arrays, axes, **params: (
    _barrier.bind(*arrays, **params),
    axes,
)


def type_of(x: Any) -> Any:
    """The abstract type (shape, dtype, weak type, sharding) of a value, or the type itself."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return x if hasattr(x, "update_weak_type") else jax.typeof(x)


def cotangent_type(aval: Any) -> Any:
    """The type of the cotangents of values of type `aval`."""
    convert = getattr(aval, "to_ct_aval", None) or aval.to_tangent_aval
    return convert().strip_weak_type()


def varying_like(x: Any, tree: Any) -> Any:
    """A value, said to differ between the devices of a mapped region wherever arrays do."""
    missing = frozenset().union(*map(_varying, jax.tree.leaves(tree))) - _varying(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def shared_like(x: Any, y: Any) -> tuple[Any, int]:
    """The greatest of a value on those devices of a mapped region that share another one.

    Returns:
        The value, and how many devices share the other one.
    """
    axes = tuple(sorted(_varying(x) - _varying(y)))
    return (jax.lax.pmax(x, axes), jax.lax.axis_size(axes)) if axes else (x, 1)


def _varying(x: Any) -> frozenset[str]:
    """The axes of a mapped region along which a value may differ."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of carried values among a `scan` equation's operands."""
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_ref(aval: Any) -> bool:
    """Whether a type is that of a mutable array reference."""
    return type(aval).__name__ == "AbstractRef"


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What context managers have changed in this thread, as a context for another thread.

    Meshes, precisions and promotion rules are among it: a function traced in another thread would
    become a different one without them.
    """
    # There is no public way, so nothing but this function depends on it.
    from jax._src import config, mesh

    members = (*vars(config).values(), *vars(mesh).values(), *config.config_states.values())
    found = {id(x): x for x in members if isinstance(x, config.config_ext.Config)}
    values = [(c, c.get_local()) for c in found.values()]
    values = [(c, value) for c, value in values if value is not config.config_ext.unset]
    environment = mesh.thread_resources.env

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, mesh.thread_resources, "env", mesh.thread_resources.env)
            mesh.thread_resources.env = environment
            for setting, value in values:
                stack.callback(setting.set_local, setting.swap_local(value))
            yield

    return settings


#: What functions with an adaptive policy do while they are traced. JAX keeps what it has traced of
#: inner functions (`jax.jit`, the bodies of loops) by the function and by such contexts.
_trace_mode = jax.make_user_context(None)


def trace_mode() -> Any:
    """The mode that functions are traced in; see `trace_in`."""
    return _trace_mode.value


def trace_in(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Sets, for this thread, the mode that functions are traced in.

    What is traced, or called from JAX's caches, in one mode never serves another.

    Args:
        mode: hashable; modes that are equal trace alike.
    """
    return _trace_mode(mode)  # type: ignore[return-value]


def current_scopes() -> str:
    """The name stack at this point of a trace, such as `jvp(Model)/Block_0`."""
    return str(source_info_util.current_name_stack())
