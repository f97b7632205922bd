"""Reports: what the backward pass of a function saves, how, and what stays exact and why."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jact import codecs, compat
from jact.engine import backward
from jact.engine.compressed import Prepared
from jact.engine.graph import module_path, numbered, raw_bytes
from jact.engine.linearize import Linearized, is_differentiable
from jact.engine.marks import Mark
from jact.engine.program import Equation, Var
from jact.engine.select import Saved
from jact.engine.trace import function_name
from jact.memory import report_render
from jact.memory.peak import analyze
from jact.memory.peak import peak as compiled_peak
from jact.plan import Adaptive, Plan, PolicyLike, Resolved
from jact.policy import Policy
from jact.transform import Compressed, as_compressed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One value that is saved for the backward pass.

    Attributes:
        name: the residual's name, which rules match: module path, primitive, index.
        line: the user's line that made it, as `file.py:12 (function)`; empty for an argument, or
            where JAX does not know.
        shape: its shape.
        dtype: its dtype, by name.
        bytes: its own size, as XLA stores it (a boolean is a byte, a uint4 half of one).
        codec: the name of the codec that stores it; "keep" for the array as it is.
        saved_bytes: what is saved of it.
        exact: whether the backward pass sees the value that the forward pass made, bit for bit.
        why: why it is exact or, if it is not, why it is saved rather than made again from others.
        offloaded: whether what is saved of it is sent to host memory.
    """

    name: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    codec: str
    saved_bytes: int
    exact: bool
    why: str
    offloaded: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak temporary memory of one compiled gradient, as `jact.memory.peak` gives it.

    Attributes:
        plain_bytes: under plain JAX.
        bytes: with jact.
        host_bytes: with jact, in host memory; None for a CPU, which has no other.
    """

    plain_bytes: int
    bytes: int
    host_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the backward pass of a function saves; `jact.report` makes it.

    It prints as a table, in terminals (with rich) and in notebooks. All figures are those of one
    call of the function at the shapes that the report was made for.

    Attributes:
        function: the function's name.
        policy: the policy, in words.
        rows: the saved values, in the order in which the forward pass makes them.
        plain_bytes: what JAX's own backward pass would save: each residual once. Arguments and
            constants that it reads as they are cost nothing and do not count, nor do arrays made
            from no argument, such as zeros. Arguments that `jact.compress` does not keep by
            reference count: they are another layer's results.
        reference_arrays: how many arguments the backward pass reads as they are.
        reference_bytes: their size. They live anyway, so this is no part of what is saved.
        peak: the compiled peaks, when they were asked for.
        max_rows: how many rows to print; all when None.
    """

    function: str
    policy: str
    rows: tuple[Row, ...]
    plain_bytes: int
    reference_arrays: int
    reference_bytes: int
    peak: Peak | None = None
    max_rows: int | None = 60

    @property
    def saved_bytes(self) -> int:
        """What is saved in all, after encoding."""
        return sum(row.saved_bytes for row in self.rows)

    @property
    def offloaded_bytes(self) -> int:
        """The part of `saved_bytes` that is sent to host memory."""
        return sum(row.saved_bytes for row in self.rows if row.offloaded)

    @property
    def ratio(self) -> float:
        """`saved_bytes` as a share of `plain_bytes`; 1.0 where there is nothing to save."""
        return self.saved_bytes / self.plain_bytes if self.plain_bytes else 1.0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON objects: all rows, whatever `max_rows` is, and the totals."""
        fields = dataclasses.asdict(self)
        del fields["max_rows"]
        fields["rows"] = [row | {"shape": list(row["shape"])} for row in fields["rows"]]
        return fields | {"saved_bytes": self.saved_bytes, "ratio": self.ratio}

    def __str__(self) -> str:
        return report_render.text(self)

    def __rich__(self) -> report_render.Renderable:
        return report_render.Renderable(self)

    def _repr_html_(self) -> str:
        return report_render.html(self)


def report(
    fun: Callable[..., Any],
    policy: PolicyLike = "int4",
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    peak: bool = False,
    max_rows: int | None = 60,
) -> Callable[..., Report]:
    """Tells what a function saves for its backward pass, and what plain JAX would save.

    Nothing is run; with `peak`, the gradient is compiled twice.

    Args:
        fun: a function to differentiate, or the result of `jact.compress`, `jact.grad` or
            `jact.value_and_grad`, which bring their own policy and arguments to differentiate.
        policy: how residuals are stored; see `jact.compress`. "off" lists what JAX itself saves.
        argnums: as in `jact.value_and_grad`.
        has_aux: as in `jact.value_and_grad`.
        peak: whether to compile the gradient, with jact and without, for its peak memory on JAX's
            default backend. For the result of `jact.compress`, the gradient is that of half the
            squared norm of its results with respect to all its floating-point arguments.
        max_rows: how many rows the printed report has at most; all when None.

    Returns:
        A function with the arguments of `fun`, which may be arrays or `jax.ShapeDtypeStruct`s, that
        returns the `Report`.

    Raises:
        TypeError: when `fun` is not callable, or for a policy of the wrong type.
        ValueError: for an unknown preset, or a `max_rows` below 1.

    >>> import jax, jact
    >>> def loss(w, x):
    ...     return jax.numpy.sum(jax.numpy.sin(x @ w))
    >>> w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 64), (256, 64)])
    >>> report = jact.report(loss, "int4")(w, x)
    >>> [(row.name, row.codec, row.bytes, row.saved_bytes) for row in report.rows]
    [('dot_general', 'int4', 65536, 9216)]
    >>> report.plain_bytes, report.saved_bytes
    (65536, 9216)
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be None or at least 1, got {max_rows}")
    function = as_compressed(fun, policy, argnums, has_aux)

    def reporter(*args: Any, **kwargs: Any) -> Report:
        plain = _exact(function).prepare(args, kwargs, rewritten=False)
        off = function.policy is None
        prepared = plain if off else function.prepare(args, kwargs)
        rows = _plain_rows(plain) if off else _rows(prepared)
        read = [prepared.linearized.forward.invars[i] for i in _inputs_read(prepared, off)]
        return Report(
            function=function_name(function),
            policy=_describe(function.policy),
            rows=tuple(rows),
            plain_bytes=sum(raw_bytes(var.aval) for var in _plain_residuals(plain)),
            reference_arrays=len(read),
            reference_bytes=sum(raw_bytes(var.aval) for var in read),
            peak=_peak(function, args, kwargs) if peak else None,
            max_rows=max_rows,
        )

    return reporter


def _exact(function: Compressed) -> Compressed:
    """The function with everything saved exactly."""
    function = copy.copy(function)
    function.policy = Policy(default="keep")
    return function


def _rows(prepared: Prepared) -> list[Row]:
    """One row for each residual; the arrays of a code that was made inside make up one."""
    rows: dict[str, Row] = {}
    for entry in prepared.saved:
        if not entry.value.marks:
            rows[entry.name] = _row(entry)
        for mark in entry.value.marks:
            # What a user compressed may be called more than once, and entries are numbered; of one
            # code, the first array comes first.
            latest = next(reversed(rows), entry.name)
            name = mark.name if mark.in_loop else entry.name if mark.part == 0 else latest
            row = rows.get(name) or _marked_row(name, mark)
            # Where branches share a place, it is counted once.
            size = entry.stored_bytes if mark is entry.value.marks[0] else 0
            rows[name] = dataclasses.replace(row, saved_bytes=row.saved_bytes + size)
    return list(rows.values())


def _marked_row(name: str, mark: Mark) -> Row:
    return Row(
        name=name,
        line=mark.line,
        shape=mark.shape,
        dtype=mark.dtype,
        bytes=mark.raw_bytes,
        codec=codecs.from_json(mark.codec).name,
        saved_bytes=0,
        exact=bool(mark.exact),
        why=mark.exact or mark.reason,
        offloaded=isinstance(codecs.from_json(mark.codec), codecs.Offload),
    )


def _row(entry: Saved) -> Row:
    return Row(
        name=entry.name,
        line=entry.line,
        shape=tuple(entry.value.aval.shape),
        dtype=str(entry.value.aval.dtype),
        bytes=entry.raw_bytes,
        codec=entry.codec.name,
        saved_bytes=entry.stored_bytes,
        exact=bool(entry.exact),
        why=entry.exact or entry.reason,
        offloaded=isinstance(entry.codec, codecs.Offload),
    )


def _plain_residuals(prepared: Prepared) -> list[Var]:
    """What JAX's own backward pass saves: its residuals, less what costs nothing."""
    program = prepared.linearized.forward
    inputs = zip(program.invars, prepared.inputs, strict=True)
    free = {*program.consts, *(var for var, spec in inputs if not spec.encoded)}
    # JAX lists the zeros that a ReLU selects, for one. XLA makes such arrays where it needs them,
    # so to count them would flatter jact.
    varying = {*program.consts, *program.invars}
    for eqn in program.eqns:
        if any(compat.is_var(atom) and atom in varying for atom in eqn.invars):
            varying.update(eqn.outvars)
    return [v for v in _residuals(prepared.linearized) if v in varying and v not in free]


def _residuals(linearized: Linearized) -> list[Var]:
    """The variables among the residuals, each once."""
    variables: list[Any] = [atom for atom in linearized.residuals if compat.is_var(atom)]
    return list(dict.fromkeys(variables))


def _plain_rows(prepared: Prepared) -> Iterator[Row]:
    """The residuals of plain JAX."""
    program = prepared.linearized.forward
    makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
    inputs = {v: spec.name for v, spec in zip(program.invars, prepared.inputs, strict=True)}
    counts: Counter[str] = Counter()
    for var in _plain_residuals(prepared):
        name = _name(makers[var]) if var in makers else inputs[var]
        line = compat.source_line(makers[var].source_info) if var in makers else ""
        aval: Any = var.aval
        size = raw_bytes(aval)
        yield Row(
            name=numbered(name, counts[name]),
            line=line,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            bytes=size,
            codec="keep",
            saved_bytes=size,
            exact=True,
            why="JAX saves it",
        )
        counts[name] += 1


def _name(eqn: Equation) -> str:
    tag = eqn.params["name"] if eqn.primitive.name == "name" else eqn.primitive.name
    return f"{module_path(eqn)}{tag}"


def _inputs_read(prepared: Prepared, off: bool) -> list[int]:
    """Positions of the inputs that the backward pass reads as they are."""
    if not off:
        return backward.inputs_read(prepared.linearized, prepared.saved)
    read = set(_residuals(prepared.linearized)) - set(_plain_residuals(prepared))
    return [i for i, var in enumerate(prepared.linearized.forward.invars) if var in read]


def _describe(policy: Resolved | None) -> str:
    if policy is None:
        return "off"
    if isinstance(policy, Adaptive):
        return f"a controller with {_describe(policy.current)}"
    if isinstance(policy, Plan):
        return f"a plan made from {_describe(policy.basis)}"
    default = policy.default if isinstance(policy.default, str) else policy.default.name
    rules = len(policy.rules)
    return f"{default} and {rules} rule{'s' * (rules > 1)}" if rules else default


def _peak(function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Peak:
    plain_function = copy.copy(function)
    plain_function.policy = None
    plain = compiled_peak(_gradient(plain_function), args, kwargs)
    if function.policy is None:
        return Peak(plain_bytes=plain, bytes=plain)
    ours = analyze(_gradient(function), args, kwargs)
    host = None if jax.default_backend() == "cpu" else ours.host_temp_bytes
    return Peak(plain_bytes=plain, bytes=ours.temp_bytes, host_bytes=host)


def _gradient(function: Compressed) -> Callable[..., Any]:
    """The value and gradient of a function of (args, kwargs), where only arrays come out."""
    # A part of a model has results of any shape, and we take them for their own cotangents.
    positions, has_aux = function._differentiated, function._has_aux

    def gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten_with_path((args, kwargs))
        chosen = {n % max(len(args), 1) for n in positions}
        moving = {
            i: leaf
            for i, (path, leaf) in enumerate(leaves)
            if _is_float(leaf) and (not positions or (path[0].idx == 0 and path[1].idx in chosen))
        }

        def at(moving: dict[int, Any]) -> tuple[list[Any], list[Any]]:
            values = [moving.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
            new_args, new_kwargs = jax.tree.unflatten(tree, values)
            out = function(*new_args, **new_kwargs)
            main = [x for x in jax.tree.leaves(out[0] if has_aux else out) if _is_float(x)]
            return main, [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

        main, pull, outputs = jax.vjp(at, moving, has_aux=True)
        return outputs, pull([jnp.ones_like(x) for x in main] if positions else main)

    return gradient


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and is_differentiable(leaf.dtype)
