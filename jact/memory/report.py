"""Reports: what the backward pass of a function saves, how, and what stays exact and why."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jact.compressed_function import Compressed
from jact.engine.compressed import uncompressed
from jact.engine.storage import raw_bytes
from jact.engine.trace import function_name
from jact.memory import report_render
from jact.memory.report_compare import Comparison
from jact.memory.report_groups import Group, grouped, largest_first
from jact.memory.report_peak import Peak, gradient_peak
from jact.memory.report_rows import (
    Row,
    compressed_rows,
    inputs_read,
    plain_residuals,
    plain_rows,
)
from jact.plan import Adaptive, Plan, PolicyLike, Resolved
from jact.policy import Policy
from jact.transform import as_compressed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Peak", "Report", "Row", "report"]


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

    def records(self) -> list[dict[str, Any]]:
        """One dictionary of plain values per saved value, as `pandas.DataFrame` takes them."""
        return [
            dataclasses.asdict(row) | {"module": row.module, "shape": list(row.shape)}
            for row in self.rows
        ]

    def groups(self, by: str = "module", depth: int | None = None) -> list[Group]:
        """Totals of the rows that have something in common, the most saved bytes first.

        Args:
            by: "module", "kind", "codec" or "why".
            depth: how many parts of a module's path to tell apart; all when None.

        Raises:
            ValueError: `by` is none of these, or `depth` is below 1.
        """
        return largest_first(grouped(self.rows, by, depth))

    def compare(self, *others: Report, changes: bool = False) -> Comparison:
        """Sets this report and others of the same function side by side, residual by residual.

        Args:
            *others: reports under other policies.
            changes: whether to leave out what is stored alike in all of them.
        """
        return Comparison((self, *others), changes)

    def __sub__(self, other: Report) -> Comparison:
        """What changes from another report to this one."""
        if not isinstance(other, Report):
            return NotImplemented
        return other.compare(self, changes=True)

    def plot(self, kind: str = "both") -> Figure:
        """Draws what is saved.

        Args:
            kind: "treemap" (modules as rectangles, as large as what they save), "bars" (each
                layer's bytes before and after) or "both".

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: `kind` is none of these.
        """
        from jact.memory import plots

        return plots.report(self, kind)

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
        fun: a function to differentiate, or the result of `jact.compress`, or of jact's `grad` or
            `value_and_grad`, those of `jact.nnx` too, which bring their own policy and arguments to
            differentiate. Of an NNX module, the parameters are differentiated.
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
        off = function.policy is None
        with uncompressed():
            plain = _exact(function).prepare(args, kwargs, rewritten=False)
        if off:
            # Compressed functions inside of it still save codes.
            prepared = _exact(function).prepare(args, kwargs, rewritten=False)
        else:
            prepared = function.prepare(args, kwargs)
        rows = plain_rows(prepared) if off else compressed_rows(prepared)
        read = [prepared.linearized.forward.invars[i] for i in inputs_read(prepared, off)]
        return Report(
            function=function_name(function),
            policy=_describe(function.policy),
            rows=tuple(rows),
            plain_bytes=sum(raw_bytes(var.aval) for var in plain_residuals(plain)),
            reference_arrays=len(read),
            reference_bytes=sum(raw_bytes(var.aval) for var in read),
            peak=gradient_peak(function, args, kwargs) if peak else None,
            max_rows=max_rows,
        )

    return reporter


def _exact(function: Compressed) -> Compressed:
    """The function with everything saved exactly."""
    function = copy.copy(function)
    function.policy = Policy(default="keep")
    return function


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
