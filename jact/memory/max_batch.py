"""The largest batch that fits, found by asking the compiler instead of by crashing the device."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from jact.memory import tables
from jact.memory.peak import analyze
from jact.memory.search import Probe, search
from jact.memory.sizes import format_bytes, parse_bytes
from jact.spelling import must_be_one_of

_COLUMNS = ("policy", "size", "/ first", "memory", "too large", "compiled", "seconds")

# How many compilations a search usually takes, for the progress bar.
_USUAL_PROBES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size that fits under one policy.

    Attributes:
        policy: the policy, in words.
        size: the largest size that fits; 0 if none does.
        bytes: what a step of this size needs; 0 if none fits.
        too_large: the smallest size that was found not to fit; None if the search's limit fits.
        probes: what was compiled, in that order.
        seconds: the time that compiling took.
    """

    policy: str
    size: int
    bytes: int
    too_large: int | None
    probes: tuple[Probe, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxBatch:
    """The largest sizes under several policies; `max_batch` makes it. It shows itself as a table.

    Attributes:
        memory: what had to be enough, in bytes.
        target: the device that was compiled for; None is JAX's default backend.
        results: one for each policy.
    """

    memory: int
    target: str | None
    results: tuple[Largest, ...]

    def __getitem__(self, policy: str) -> int:
        """The largest size under a policy.

        Raises:
            KeyError: the search was not made for this policy.
        """
        sizes = {result.policy: result.size for result in self.results}
        if policy not in sizes:
            raise KeyError(f"policy {must_be_one_of(policy, sizes, hint='')}")
        return sizes[policy]

    def ratio(self, policy: str) -> float | None:
        """How many times the first policy's size fits under a policy; None if that fits none."""
        first = self.results[0].size
        return self[policy] / first if first else None

    def records(self) -> list[dict[str, Any]]:
        """One dictionary of plain values per policy, as `pandas.DataFrame` takes them."""
        return [
            {
                "policy": result.policy,
                "size": result.size,
                "ratio": self.ratio(result.policy),
                "bytes": result.bytes,
                "too_large": result.too_large,
                "compilations": len(result.probes),
                "seconds": result.seconds,
            }
            for result in self.results
        ]

    @property
    def refusals(self) -> list[str]:
        """What the compiler said of sizes that it cannot compile, memory apart."""
        return [
            f"{result.policy}: XLA does not compile {probe.size}: {probe.refused}"
            for result in self.results
            for probe in result.probes
            if probe.refused
        ]

    def to_json(self) -> dict[str, Any]:
        """The results as JSON objects."""
        return dataclasses.asdict(self)

    def __rich__(self) -> RenderableType:
        table = tables.rich_table(_COLUMNS, self._cells(), _COLUMNS[1:])
        table.title = self._title()
        return Group(table, *(Text(line) for line in self.refusals))

    def __str__(self) -> str:
        return tables.plain_text(self)

    def _repr_html_(self) -> str:
        table = tables.html_table(_COLUMNS, self._cells(), _COLUMNS[1:])
        refusals = "".join(f"<p>{tables.escape(line)}</p>" for line in self.refusals)
        return f"<div><p>{tables.escape(self._title())}</p>{table}{refusals}</div>"

    def _title(self) -> str:
        where = "" if self.target is None else f", {self.target}"
        return f"Largest size in {format_bytes(self.memory)}{where}"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row["policy"],
                str(row["size"]),
                "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
                format_bytes(row["bytes"]) if row["size"] else "-",
                "-" if row["too_large"] is None else str(row["too_large"]),
                str(row["compilations"]),
                f"{row['seconds']:.1f}",
            )
            for row in self.records()
        ]


def max_batch(
    make_step: Callable[[int, Any], tuple[Callable[..., Any], Sequence[Any]]],
    memory: int | str,
    *,
    target: str | None = None,
    policies: Sequence[Any] | Mapping[str, Any] = ("off", "int4"),
    start: int = 8,
    multiple: int = 1,
    limit: int = 2**20,
    tolerance: float = 0.0,
    progress: bool = True,
) -> MaxBatch:
    """Finds the largest batch whose training step fits into a device's memory.

    The step is compiled at a few sizes; a line through their memory predicts the answer, which is
    compiled to make sure. Nothing is run, and no parameter is allocated. It need not be the batch:
    any integer that `make_step` turns into a step will do, such as a sequence length, a width or a
    number of layers.

    What has to fit is all that the step holds at once: its arguments (parameters, the optimizer's
    state, the batch), its results where they do not take the place of donated arguments, and its
    temporary buffers. JAX itself takes some memory besides, and by default hands three quarters of
    a GPU's to programs (`XLA_PYTHON_CLIENT_MEM_FRACTION`).

    Args:
        make_step: takes a size and a policy and returns a training step with its arguments, which
            may be `jax.ShapeDtypeStruct`s. Jit the step with `donate_argnums`, as one trains with
            it: else parameters count twice.
        memory: what a device has: bytes, or a string such as "16 GiB".
        target: the device to compile for, as in `jact.memory.peak`.
        policies: what `make_step` is called with: policies of jact, "off" for plain JAX, or
            anything else that it understands, such as "remat". Or a dictionary of these by name.
            Ratios are those to the first one.
        start: the first size that is compiled. A good guess saves a compilation.
        multiple: sizes are multiples of it.
        limit: no larger size is tried.
        tolerance: 0 finds the size that fits while the next one does not. 0.02 is content with a
            bracket of 2 %, which takes one or two compilations less.
        progress: whether to show a progress bar: on stderr if that is a terminal, and in a notebook
            if `ipywidgets` is installed.

    Returns:
        The largest size for each policy.

    Raises:
        TypeError: `memory` is neither an integer nor a string, or `make_step` returns something
            else than a pair of a function and its arguments.
        ValueError: `memory` is no size, `policies` is empty, `start`, `multiple` or `limit` is
            below 1, `limit` is below `multiple`, `tolerance` is negative, or `target` is unknown.
        MissingPluginError: the target's compiler is not installed.

    Example:
        >>> import jax, jact
        >>> def make_step(batch, policy):
        ...     def loss(w, x):
        ...         for _ in range(8):
        ...             x = jax.numpy.tanh(x @ w)
        ...         return jax.numpy.sum(x)
        ...     w = jax.ShapeDtypeStruct((64, 64), "float32")
        ...     x = jax.ShapeDtypeStruct((batch, 64), "float32")
        ...     return jax.jit(jact.grad(loss, policy=policy)), (w, x)
        >>> found = jact.memory.max_batch(make_step, "4 MiB", multiple=64, progress=False)
        >>> found["int4"] > found["off"]
        True
    """
    budget = parse_bytes(memory)
    for name, value in (("start", start), ("multiple", multiple), ("limit", limit)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if limit < multiple:
        raise ValueError(f"limit must be at least multiple, got {limit} and {multiple}")
    if tolerance < 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    named = _named(policies)
    results = []
    with _bar(progress) as bar:
        for name, policy in named.items():
            task = bar.add_task(name, total=_USUAL_PROBES)
            smallest = limit + 1

            def measure(
                size: int, policy: Any = policy, task: Any = task, name: str = name
            ) -> Probe:
                nonlocal smallest
                bar.update(task, description=f"{name}: compiling {size}")
                probe = _compile(make_step, size, policy, target, smallest)
                smallest = min(size, smallest)
                done = bar.tasks[task].completed + 1
                bar.update(task, completed=done, total=max(_USUAL_PROBES, done + 1))
                return probe

            begin = time.perf_counter()
            probes = search(
                measure,
                budget,
                start=start,
                multiple=multiple,
                limit=limit,
                tolerance=tolerance,
            )
            result = _largest(name, probes, budget, time.perf_counter() - begin)
            results.append(result)
            bar.update(task, description=f"{name}: {result.size} fits", total=len(probes))
    return MaxBatch(memory=budget, target=target, results=tuple(results))


def _named(policies: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(policies, str):
        policies = (policies,)
    if not isinstance(policies, Mapping):
        policies = {_name(policy): policy for policy in policies}
    if not policies:
        raise ValueError("policies must name at least one policy")
    return dict(policies)


def _name(policy: Any) -> str:
    return policy if isinstance(policy, str) else getattr(policy, "name", None) or str(policy)


def _compile(
    make_step: Callable[[int, Any], tuple[Callable[..., Any], Sequence[Any]]],
    size: int,
    policy: Any,
    target: str | None,
    smallest: int,
) -> Probe:
    """Compiles one size; `smallest` is the least one that was tried before."""
    step, args = step_and_args(make_step(size, policy), "make_step")
    try:
        analysis = analyze(step, *args, target=target)
    except RuntimeError as error:  # jax.errors.JaxRuntimeError is one, too.
        # XLA plans a program for a TPU within its memory, and refuses what does not fit.
        if "RESOURCE_EXHAUSTED" in str(error):
            return Probe(size, None)
        # A size of so many elements that XLA fails is too large, whatever memory there is.
        if size > smallest:
            return Probe(size, None, refused=str(error).strip().partition("\n")[0])
        error.add_note(f"This was raised while the step of size {size} was compiled.")
        raise
    return Probe(size, analysis.total_bytes, analysis.argument_bytes)


def step_and_args(result: Any, name: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function and the arguments that a user's function returned.

    Args:
        result: what it returned.
        name: what to call it in the message.

    Raises:
        TypeError: it is no pair of a function and a tuple or list.
    """
    if isinstance(result, tuple) and len(result) == 2:
        step, args = result
        if callable(step) and isinstance(args, tuple | list):
            return step, args
    items = result if isinstance(result, tuple) else (result,)
    shown = ", ".join("array" if isinstance(x, jax.Array) else type(x).__name__ for x in items)
    shown = f"({shown})" if isinstance(result, tuple) else shown
    raise TypeError(
        f"{name} must return a pair (fn, args), args being the tuple of fn's arguments, as in "
        f"`return step, (params, batch)`; got {shown}"
    )


def _largest(name: str, probes: Sequence[Probe], memory: int, seconds: float) -> Largest:
    fitting = {p.size: p.bytes or 0 for p in probes if p.fits(memory)}
    others = [p.size for p in probes if p.size not in fitting]
    size = max(fitting, default=0)
    return Largest(
        policy=name,
        size=size,
        bytes=fitting.get(size, 0),
        too_large=min((n for n in others if n > size), default=None),
        probes=tuple(probes),
        seconds=seconds,
    )


def _bar(shown: bool) -> Progress:
    console = Console(stderr=True)
    if console.is_jupyter:
        # Without it, rich warns instead of drawing.
        can_draw = importlib.util.find_spec("ipywidgets") is not None
    else:
        can_draw = console.is_terminal
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not (shown and can_draw),
        transient=True,
    )
