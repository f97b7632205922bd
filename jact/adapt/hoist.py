"""Figures out of the middle of a traced function: out of loops, branches and derivatives.

What a controller wants to know arises in the backward pass, inside of the user's training step:
maybe in a loop over micro-batches, in a branch, on a device of a mesh. `emit` marks it there, by an
equation of its own. `collect` then runs the traced step for those figures alone: it adds them to
the results of each loop and branch that holds a mark, and leaves out whatever they do not depend on
(the optimizer, new statistics of BatchNorm, effects). No callback is involved, so it works under
any sharding, and XLA sees one ordinary function.

Figures add up: over the iterations of a loop, over devices, over calls with the same label. For
means emit a count as well. `flag` goes the other way: whoever runs the collected function says what
it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jact import compat
from jact.engine import program as programs
from jact.engine.program import Equation, Var

#: Figures by label and name.
type Figures = dict[str, dict[str, jax.Array]]

#: The parameters under which calls hold what they call.
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")

_mark = jex.Primitive("jact_figures")
_mark.multiple_results = True
_flag = jex.Primitive("jact_flag")


def emit(values: Sequence[Any], label: str, figures: Mapping[str, Any]) -> list[Any]:
    """Marks figures where they arise.

    Args:
        values: arrays that the function goes on with; the mark lives as long as one of them is
            used.
        label: whose figures they are.
        figures: arrays by name.

    Returns:
        The values, as they are.
    """
    names = tuple(figures)
    arrays = [*values, *map(lax.stop_gradient, figures.values())]
    return list(_mark.bind(*arrays, label=label, names=names))


def flag() -> Any:
    """A bool, which is known only when `collect` runs the function; True where it does not."""
    return _flag.bind()


def collect(closed: Any, args: Sequence[Any], flag: Any = True) -> Figures:
    """Runs a traced function for the figures that are marked in it.

    Args:
        closed: the function.
        args: its inputs.
        flag: what `flag` is in it; may be traced.

    Returns:
        The sums of the figures, by label and name.

    Raises:
        NotImplementedError: when figures are marked inside of an operation that they cannot be
            taken out of, or the function holds mutable references, which a second run would change.
    """
    if any(compat.is_ref(v.aval) for v in [*closed.jaxpr.invars, *closed.jaxpr.constvars]):
        raise NotImplementedError(
            "a training step with mutable references (jax.new_ref) among its arguments, or closed "
            "over, cannot be probed: that would write to them"
        )
    found = _Found(flag)
    _run(closed, args, found, wanted_outputs=False)
    return found.figures


def count(closed: Any) -> Counter[str]:
    """How many marks there are of each label; one in a loop counts once."""
    total: Counter[str] = Counter()
    for eqn in compat.equations(closed):
        if eqn.primitive is _mark:
            total[eqn.params["label"]] += 1
        for inner in jex.jaxprs_in_params(eqn.params):
            total += count(inner)
    return total


class _Found:
    """What is found in one function, and what is told to it.

    Attributes:
        flag: a bool.
        figures: the sums so far.
    """

    def __init__(self, flag: Any):
        self.flag = flag
        self.figures: Figures = {}

    def add(self, figures: Figures) -> None:
        """Adds figures to the sums."""
        for label, values in figures.items():
            total = self.figures.setdefault(label, {})
            for name, value in values.items():
                total[name] = total[name] + value if name in total else value

    def inner(self) -> _Found:
        """For a function that is called in this one."""
        return _Found(self.flag)


def _run(closed: Any, args: Sequence[Any], found: _Found, wanted_outputs: bool = True) -> list[Any]:
    """Runs a function; adds the figures to `found`, and returns the results if wanted."""
    program = programs.flatten(closed)
    outs = program.outvars if wanted_outputs else ()
    eqns = _live(program.eqns, outs)
    env = dict(program.consts) | dict(zip(program.invars, args, strict=True))

    def bind(eqn: Equation, values: Sequence[Any]) -> list[Any]:
        if eqn.primitive is _mark:
            count = len(eqn.outvars)
            names, figures = eqn.params["names"], values[count:]
            found.add({eqn.params["label"]: dict(zip(names, figures, strict=True))})
            return list(values[:count])
        if eqn.primitive is _flag:
            return [jnp.asarray(found.flag)]
        if not _holds_mark(eqn):
            return compat.bind_equation(eqn, values)
        with compat.equation_context(eqn):
            return _enter(eqn, values, found)

    # A mark's own values are computed only where something else needs them.
    for eqn in eqns:
        if eqn.primitive is _mark:
            env.update((v, None) for v in programs.operands(eqn) if v not in env)
    programs.evaluate(eqns, env, keep=outs, bind=bind)
    return [programs.read(env, a) for a in outs]


def _live(eqns: Sequence[Equation], outs: Sequence[Any]) -> list[Equation]:
    """What the outputs and the figures depend on; effects are left out."""
    needed: set[Var] = {a for a in outs if compat.is_var(a)}
    live = []
    for eqn in reversed(eqns):
        used = any(v in needed for v in eqn.outvars)
        if eqn.primitive is _mark:
            first = 0 if used else len(eqn.outvars)
            needed.update(a for a in eqn.invars[first:] if compat.is_var(a))
            live.append(eqn)
        elif used or _holds_mark(eqn) or _writes(eqn):
            needed.update(programs.operands(eqn))
            live.append(eqn)
    return live[::-1]


def _writes(eqn: Equation) -> bool:
    """Whether an equation changes a mutable reference, made within the function."""
    return any(compat.is_ref(v.aval) for v in programs.operands(eqn))


def _holds_mark(eqn: Equation) -> bool:
    return any(
        inner.primitive in (_mark, _flag) or _holds_mark(inner)
        for jaxpr in jex.jaxprs_in_params(eqn.params)
        for inner in compat.equations(jaxpr)
    )


def _enter(eqn: Equation, args: Sequence[Any], found: _Found) -> list[Any]:
    name = eqn.primitive.name
    if name in _ENTER:
        return _ENTER[name](eqn, args, found)
    inner = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
    if inner is None or name not in _INLINED:
        raise NotImplementedError(
            f"a policy that adapts is used inside of {name!r}, out of which its figures cannot be "
            "taken; use it in loops, branches, jax.jit, jax.checkpoint, jax.vmap and jax.shard_map"
        )
    return _run(compat.as_closed(inner), args, found)


#: Calls that mean the same when they are inlined, once nothing is differentiated any more.
_INLINED = frozenset(
    {
        *compat.JIT_PRIMITIVES,
        *compat.CLOSED_CALL_PRIMITIVES,
        *("checkpoint", "remat", "remat2"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("core_call", "custom_lin"),
    }
)


def _enter_scan(eqn: Equation, args: Sequence[Any], found: _Found) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = compat.scan_counts(eqn)
    end = num_consts + num_carry
    consts, init, xs = args[:num_consts], args[num_consts:end], args[end:]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], Any]:
        inner = found.inner()
        outs = _run(params["jaxpr"], [*consts, *carry, *x], inner)
        return outs[:num_carry], (outs[num_carry:], inner.figures)

    carry, (ys, figures) = lax.scan(
        step,
        list(init),
        list(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    found.add(jax.tree.map(lambda x: x.sum(0), figures))
    return [*carry, *ys]


def _enter_while(eqn: Equation, args: Sequence[Any], found: _Found) -> list[Any]:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:num_cond], args[num_cond : num_cond + num_body]
    init = list(args[num_cond + num_body :])
    if any(map(_holds_mark, compat.equations(params["cond_jaxpr"]))):
        raise NotImplementedError(
            "a policy that adapts is used in the condition of a while loop; use it in the body"
        )

    def body(carry: Sequence[Any]) -> tuple[list[Any], Figures]:
        inner = found.inner()
        outs = _run(params["body_jaxpr"], [*body_consts, *carry], inner)
        return outs, inner.figures

    def step(state: tuple[list[Any], Figures]) -> tuple[list[Any], Figures]:
        carry, total = state
        outs, figures = body(carry)
        return outs, jax.tree.map(jnp.add, total, figures)

    def condition(state: tuple[list[Any], Figures]) -> Any:
        (result,) = _run(params["cond_jaxpr"], [*cond_consts, *state[0]], found.inner())
        return result

    start = jax.tree.map(_zeros, jax.eval_shape(body, init)[1])
    outs, figures = lax.while_loop(condition, step, (init, start))
    found.add(figures)
    return outs


def _enter_cond(eqn: Equation, args: Sequence[Any], found: _Found) -> list[Any]:
    index, *operands = args

    def branch(closed: Any, *operands: Any) -> tuple[list[Any], Figures]:
        inner = found.inner()
        return _run(closed, operands, inner), inner.figures

    branches = [jax.tree_util.Partial(branch, closed) for closed in eqn.params["branches"]]
    nothing = found.inner()
    for run in branches:
        nothing.add(jax.tree.map(_zeros, jax.eval_shape(run, *operands)[1]))

    def padded(run: Any) -> Any:
        def run_padded(*operands: Any) -> tuple[list[Any], Figures]:
            outs, figures = run(*operands)
            total = found.inner()
            total.add(nothing.figures)
            total.add(figures)
            return outs, total.figures

        return run_padded

    outs, figures = lax.switch(index, list(map(padded, branches)), *operands)
    found.add(figures)
    return list(outs)


def _enter_shard_map(eqn: Equation, args: Sequence[Any], found: _Found) -> list[Any]:
    params = eqn.params
    axes = tuple(params["newly_manual_axes"])
    replicated = jax.sharding.PartitionSpec()

    def run(flag: Any, *parts: Any) -> tuple[tuple[Any, ...], Figures]:
        inner = _Found(flag)
        outs = _run(compat.as_closed(params["jaxpr"]), parts, inner)
        return tuple(outs), jax.tree.map(lambda x: lax.psum(x, axes), inner.figures)

    outs, figures = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(replicated, *params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), replicated),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(jnp.asarray(found.flag), *args)
    found.add(figures)
    return list(outs)


_ENTER = {
    "scan": _enter_scan,
    "while": _enter_while,
    "cond": _enter_cond,
    "shard_map": _enter_shard_map,
}


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _identity(*arrays: Any, names: tuple[str, ...], label: str) -> list[Any]:
    del label
    return list(arrays[: len(arrays) - len(names)])


def _batched(
    arrays: Sequence[Any], axes: Sequence[Any], *, names: tuple[str, ...], label: str
) -> tuple[list[Any], list[Any]]:
    """Figures add up over what is mapped as well; those of no part of it count for each."""
    count = len(arrays) - len(names)
    sizes = [x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None]
    size = math.prod(sizes[:1])
    figures = [
        x * jnp.asarray(size, x.dtype) if a is None else x.sum(a)
        for x, a in zip(arrays[count:], axes[count:], strict=True)
    ]
    outs = _mark.bind(*arrays[:count], *figures, names=names, label=label)
    return list(outs), list(axes[:count])


_flag.def_impl(lambda: jnp.asarray(True))
_flag.def_abstract_eval(lambda: compat.type_of(np.True_))
mlir.register_lowering(_flag, mlir.lower_fun(lambda: jnp.asarray(True), multiple_results=False))
_mark.def_impl(_identity)
_mark.def_abstract_eval(_identity)
mlir.register_lowering(_mark, mlir.lower_fun(_identity, multiple_results=True))
batching.primitive_batchers[_mark] = _batched
ad.primitive_jvps[_mark] = lambda primals, tangents, *, names, label: (
    _mark.bind(*primals, names=names, label=label),
    list(tangents[: len(tangents) - len(names)]),
)
