"""Live memory over a compiled program's schedule: where the peak is, and what is in it."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jact.memory import assignment as assignments
from jact.memory.assignment import Assignment
from jact.memory.peak import MemoryAnalysis, analyze
from jact.memory.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A temporary array that is live at the peak.

    Attributes:
        module: the path of the module whose operation made it; empty where XLA does not know.
        operation: the operation's name, or the instruction's where XLA does not know that either.
        type: its dtype and shape as XLA writes them, such as "f32[64,128]".
        bytes: its size.
        phase: the pass in which it is made: "forward", "backward", "update", or "" where the
            program has no backward pass.
        made: the position in the schedule at which it is made.
    """

    module: str
    operation: str
    type: str
    bytes: int
    phase: str
    made: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """The live temporary memory of one compiled program on one device; `timeline` makes it.

    It prints as the largest buffers at the peak; `plot` draws it.

    Attributes:
        label: what the program is called in pictures.
        positions: positions in the schedule at which the live memory changes, ascending.
        live_bytes: the live temporary memory from each of these positions on; within an
            instruction, the most.
        length: how many instructions the schedule has. A loop's body counts once, as XLA plans it.
        backward: the position at which the backward pass begins; None if there is none.
        backward_end: the position behind its last instruction; None if there is none.
        peak_position: where the peak is.
        temp_bytes: what XLA sets aside for temporary buffers, as `jact.memory.peak` gives it. The
            highest point is lower by the gaps that packing leaves.
        argument_bytes: size of the arguments, which live all the time.
        output_bytes: size of the outputs that do not lie in donated arguments.
        buffers: what is live at the peak, the largest first.
    """

    label: str
    positions: tuple[int, ...]
    live_bytes: tuple[int, ...]
    length: int
    backward: int | None
    backward_end: int | None
    peak_position: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    buffers: tuple[Buffer, ...]

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return max(self.live_bytes, default=0)

    @property
    def gap_bytes(self) -> int:
        """What XLA sets aside beyond the highest point: gaps that packing buffers leaves."""
        return self.temp_bytes - self.peak_bytes

    @property
    def peak_phase(self) -> str:
        """Where the peak is: "forward", "backward" or "update"; "" without a backward pass."""
        passes = self.backward is not None and (self.backward, self.backward_end or 0)
        return _pass_at(self.peak_position, passes or None)

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per buffer at the peak, as `pandas.DataFrame` takes them."""
        return [dataclasses.asdict(buffer) for buffer in self.buffers]

    def to_json(self) -> dict[str, Any]:
        """The timeline as JSON objects; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        """The timeline that `to_json` wrote."""
        lists = {name: tuple(data[name]) for name in ("positions", "live_bytes")}
        buffers = tuple(Buffer(**buffer) for buffer in data["buffers"])
        return cls(**{**data, **lists, "buffers": buffers})

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Bytes at the peak of each module, the largest first.

        Args:
            depth: how many parts of a module's path to tell apart; all when None.
        """
        totals: dict[str, int] = {}
        for buffer in self.buffers:
            name = "/".join(buffer.module.split("/")[:depth])
            totals[name] = totals.get(name, 0) + buffer.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def plot(self, *others: Timeline, axes: Axes | None = None) -> Axes:
        """Draws the live memory, with that of others over it.

        Args:
            *others: timelines of other programs, say of plain JAX.
            axes: where to draw; a new figure when None.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from jact.memory import plots

        return plots.timelines((self, *others), axes)

    def __str__(self) -> str:
        where = (
            f" in the {self.peak_phase} pass" if self.peak_phase in ("forward", "backward") else ""
        )
        lines = [
            f"Peak of {self.label}: {format_bytes(self.peak_bytes)}{where}, at "
            f"{self.peak_position} of {self.length} instructions; XLA sets aside "
            f"{format_bytes(self.temp_bytes)}."
        ]
        shown = self.buffers[:12]
        for buffer in shown:
            where = f"{buffer.module}/{buffer.operation}" if buffer.module else buffer.operation
            lines.append(
                f"  {format_bytes(buffer.bytes):>10}  {buffer.type:<24} {buffer.phase:<9} {where}"
            )
        if rest := self.buffers[len(shown) :]:
            size = format_bytes(sum(buffer.bytes for buffer in rest))
            lines.append(f"  {size:>10}  in {len(rest)} more")
        return "\n".join(lines)


def timeline(
    step: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    label: str = "",
    **kwargs: Any,
) -> Timeline:
    """Compiles a step and tells how its live memory goes up and down as it runs.

    XLA decides when each buffer lives when it compiles; nothing is run, and for a `target` nothing
    is allocated. The schedule is that of the compiled program, on TPUs as well; there it holds the
    main memory (HBM), not the memories within the chip.

    Args:
        step: as for `jact.memory.peak`: a gradient or a whole training step.
        *args: its arguments, as for `jact.memory.peak`.
        target: the device to compile for, as in `jact.memory.peak`.
        label: what to call it in pictures; the function's name by default.
        **kwargs: keyword arguments of `step`; neither `target` nor `label` can be among them.

    Returns:
        The timeline.

    Raises:
        ValueError: `target` is unknown.
        MissingPluginError: the target's compiler is not installed.
        RuntimeError: the backend does not say how it assigns buffers.

    Example:
        >>> import jax, jax.numpy as jnp, jact
        >>> def loss(w, x):
        ...     for _ in range(4):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.sum(x)
        >>> w, x = jnp.ones((64, 64)), jnp.ones((1024, 64))
        >>> plain = jact.memory.timeline(jax.grad(loss), w, x)
        >>> plain.peak_bytes >= 4 * x.nbytes, plain.buffers[0].type
        (True, 'f32[1024,64]')
    """
    name = label or getattr(step, "__name__", "") or "step"
    _, course = analyze_over_time(name, step, args, kwargs, target)
    if course is None:
        where = "JAX's default backend" if target is None else f"target={target!r}"
        raise RuntimeError(
            f"the compiler of {where} wrote no buffer assignment. If the program came from JAX's "
            "persistent compilation cache, switch that off (jax_enable_compilation_cache)."
        )
    return course


def analyze_over_time(
    label: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> tuple[MemoryAnalysis, Timeline | None]:
    """Compiles a function once for both its figures and its timeline.

    Returns:
        The analysis, and the timeline where the compiler writes down how it assigns buffers.
    """
    with tempfile.TemporaryDirectory(prefix="jact-") as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        analysis = analyze(fun, *args, target=target, compiler_options=options, **(kwargs or {}))
        # One compilation may write several programs: the main one is the largest.
        found = list(pathlib.Path(folder).glob("*after_optimizations.hlo.pb"))
        if not found:
            return analysis, None
        largest = max(found, key=lambda path: path.stat().st_size)
        return analysis, make_timeline(label, assignments.read(largest.read_bytes()), analysis)


def make_timeline(label: str, read: Assignment, analysis: MemoryAnalysis) -> Timeline:
    """A timeline from what XLA decided about buffers, and the sizes that it reports."""
    # Besides the heap there are a few buffers that live all the time.
    base = max(analysis.temp_bytes - read.heap_bytes, 0)
    positions, levels = [0], [base]
    live: dict[tuple[int, int], _Live] = {}
    at_peak: list[_Live] = []
    highest, peak_position, now, level = base, 0, 0, base
    for event in read.events:
        instruction = read.instructions.get(event.instruction)
        if event.starts and instruction is not None and instruction.position is not None:
            now = max(now, instruction.position)
        if not event.size:
            live.pop(event.place, None)
        elif event.place in live:
            live[event.place] = dataclasses.replace(live[event.place], size=event.size)
        else:
            live[event.place] = _Live(event.buffer, event.instruction, event.size, now)
        level += event.change
        if now == positions[-1]:
            levels[-1] = max(levels[-1], level)
        elif event.change:
            # What ended since the last point ended before this one.
            positions.append(now)
            levels.append(level)
        if level > highest:
            highest, peak_position, at_peak = level, now, list(live.values())
    scheduled = [i for i in read.instructions.values() if i.position is not None]
    scheduled.sort(key=lambda i: i.position or 0)
    backward = backward_pass([phase(i.op_name) for i in scheduled])
    return Timeline(
        label=label,
        positions=tuple(positions),
        live_bytes=tuple(levels),
        length=len(scheduled),
        backward=backward[0] if backward else None,
        backward_end=backward[1] if backward else None,
        peak_position=peak_position,
        temp_bytes=analysis.temp_bytes,
        argument_bytes=analysis.argument_bytes,
        output_bytes=analysis.output_bytes - analysis.alias_bytes,
        buffers=tuple(
            _buffer(one, read, backward) for one in sorted(at_peak, key=lambda one: -one.size)
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Live:
    buffer: int
    instruction: str
    size: int
    made: int


def _buffer(live: _Live, read: Assignment, backward: tuple[int, int] | None) -> Buffer:
    instruction = read.instructions.get(live.instruction)
    op_name = instruction.op_name if instruction is not None else ""
    module, operation = assignments.module_and_operation(op_name)
    return Buffer(
        module=module,
        operation=operation or live.instruction,
        type=read.types.get(live.buffer, ""),
        bytes=live.size,
        phase=_pass_at(live.made, backward),
        made=live.made,
    )


def _pass_at(position: int, backward: tuple[int, int] | None) -> str:
    if backward is None:
        return ""
    start, end = backward
    return "forward" if position < start else "backward" if position < end else "update"


def phase(op_name: str) -> str:
    """The pass that an operation belongs to, by its name.

    >>> phase("jit(step)/transpose(jvp(Net))/Dense_0/dot_general"), phase("jit(step)/jvp(Net)/tanh")
    ('backward', 'forward')
    >>> phase("jit(step)/add")
    ''
    """
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


def backward_pass(phases: Sequence[str]) -> tuple[int, int] | None:
    """Where the backward pass begins and ends.

    XLA moves single instructions out of their pass: the beginning is where the fewest instructions
    are on the wrong side of it.

    Args:
        phases: "forward", "backward" or "" for each instruction, in the order of the schedule.

    Returns:
        The position of its first instruction and the one behind its last; None without any.

    >>> backward_pass(["", "forward", "backward", "forward", "forward", "backward", "backward", ""])
    (5, 7)
    """
    if "backward" not in phases:
        return None
    wrong = best = phases.count("forward")  # with everything in the backward pass
    start = 0
    for i, name in enumerate(phases):
        wrong += {"backward": 1, "forward": -1}.get(name, 0)
        if wrong < best:
            best, start = wrong, i + 1
    last = max(i for i, name in enumerate(phases) if name == "backward")
    start = next(i for i in range(min(start, last), last + 1) if phases[i] == "backward")
    return start, last + 1
