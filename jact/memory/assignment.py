"""What XLA decided about a program's buffers: where each lies, and when it lives.

The source is the dump of a compiled program, an `xla.HloProto`
(github.com/openxla/xla/blob/main/xla/service/hlo.proto): the program in the order in which it runs,
and its buffer assignment. Field numbers below are those of that file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jact.engine.marks import DECODE, ENCODE
from jact.memory.wire import Message

# xla.PrimitiveType (xla/xla_data.proto).
_DTYPES = {
    **dict(enumerate(["pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"], 1)),
    **dict(enumerate(["f16", "f32", "f64"], 10)),
    **{15: "c64", 16: "bf16", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4"},
    **{23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2"},
    **{28: "f8e4m3", 29: "f8e3m4", 30: "s1", 31: "u1", 32: "f4e2m1fn", 33: "f8e8m0fnu"},
}
_FREE = 1  # xla.HeapSimulatorTrace.Event.Kind


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: its name, which no other instruction has.
        opcode: what it does, such as "fusion".
        op_name: the path of the JAX operation that it came from, name scopes and transformations
            included; empty where XLA made it.
        shape: its result's type.
        custom_call: the function that a "custom-call" calls.
        position: when it runs, in the order of the whole program; a loop's body runs once in it.
            None for what is inside a fusion.
    """

    name: str
    opcode: str
    op_name: str
    shape: Message
    custom_call: str
    position: int | None


@dataclasses.dataclass(frozen=True)
class Event:
    """A temporary buffer starts to live, or ends.

    Attributes:
        buffer: which one.
        instruction: the name of the instruction that makes it.
        starts: whether it starts.
        place: where it lies; buffers that live in one place at a time share it.
        change: what that adds to the memory in use, in bytes.
        size: the bytes that are in use in this place from then on.
    """

    buffer: int
    instruction: str
    starts: bool
    place: tuple[int, int]
    change: int
    size: int


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of a buffer."""

    allocation: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A program's temporary buffers in device memory.

    Attributes:
        instructions: all instructions, by name.
        events: what happens to the temporary buffers, in the order of the program.
        types: each buffer's type, such as "f32[64,128]", by its number.
        heap_bytes: the size of the memory that the buffers of the events share.
    """

    instructions: Mapping[str, Instruction]
    events: tuple[Event, ...]
    types: Mapping[int, str]
    heap_bytes: int


def read(dump: bytes) -> Assignment:
    """Reads the dump of a compiled program.

    Args:
        dump: a serialized `xla.HloProto`.

    Returns:
        The assignment of its buffers.

    Raises:
        ValueError: it is none, or it has no buffer assignment.
    """
    proto = Message(dump)
    if not proto.has(3):
        raise ValueError("the dump has no buffer assignment")
    module, assignment = proto.message(1), proto.message(3)
    instructions, unique_ids = _instructions(module)
    buffers = {buffer.integer(1): buffer for buffer in assignment.messages(1)}
    slots = {}
    heap_bytes = {}
    for allocation in assignment.messages(3):
        index, color = allocation.integer(1), allocation.integer(8)
        heap_bytes[index] = allocation.integer(2)
        # Color 0 is the device's main memory; on a TPU others are memories within the chip.
        for place in allocation.messages(9) if color == 0 else ():
            slots[place.integer(1)] = _Slot(index, place.integer(2), place.integer(3))
    events = [list(_events(trace, slots)) for trace in assignment.messages(4)]
    heaps = {slots[event.buffer].allocation for trace in events for event in trace}
    return Assignment(
        instructions=instructions,
        events=tuple(_merged(events, instructions)),
        types={
            number: _buffer_type(buffer.message(3), instructions, unique_ids)
            for number, buffer in buffers.items()
        },
        heap_bytes=sum(heap_bytes[index] for index in heaps),
    )


def _instructions(module: Message) -> tuple[dict[str, Instruction], dict[int, str]]:
    """A module's instructions by name, and their names by number."""
    computations = {c.integer(5): c for c in module.messages(3)}
    schedule = {
        entry.integer(1): entry.message(2).integers(1) for entry in module.message(7).messages(1)
    }
    raw: dict[int, Message] = {}
    called: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for number, computation in computations.items():
        for proto in computation.messages(2):
            raw[proto.integer(35)] = proto
            called[proto.integer(35)] = proto.integers(38)
        last[number] = computation.integer(6)
    order = {
        unique: position
        for position, unique in enumerate(_run(module.integer(6), schedule, called))
    }
    readers: dict[int, list[int]] = {}
    for unique, proto in raw.items():
        for operand in proto.integers(36):
            readers.setdefault(operand, []).append(unique)

    def origin(unique: int, steps: int = 3) -> str:
        """The path of an operation: its own, that which a fusion ends in, or its readers'."""
        own = raw[unique].message(7).text(2)
        inner = [last[c] for c in called[unique] if last.get(c) in raw]
        near = [*inner, *readers.get(unique, [])] if steps else []
        return own or next(filter(None, (origin(n, steps - 1) for n in near)), "")

    instructions = {
        proto.text(1): Instruction(
            name=proto.text(1),
            opcode=proto.text(2),
            op_name=origin(unique) if unique in order else proto.message(7).text(2),
            shape=proto.message(3),
            custom_call=proto.text(28),
            position=order.get(unique),
        )
        for unique, proto in raw.items()
    }
    return instructions, {unique: proto.text(1) for unique, proto in raw.items()}


def _run(
    computation: int, schedule: Mapping[int, list[int]], called: Mapping[int, list[int]]
) -> Iterator[int]:
    """The scheduled instructions in the order in which they run, a loop's body before the loop."""
    for instruction in schedule.get(computation, []):
        for inner in called.get(instruction, []):
            yield from _run(inner, schedule, called)
        yield instruction


def _events(trace: Message, slots: Mapping[int, _Slot]) -> Iterator[Event]:
    """The events of one heap, each as what it adds to the memory in use.

    Buffers in one place share it (a loop's arguments and results, a sum and what it is added to),
    so that what counts is the place: it is in use while any of them lives.
    """
    living: dict[tuple[int, int], dict[int, int]] = {}
    for proto in trace.messages(1):
        buffer, instruction = proto.integer(2), proto.text(4)
        if buffer not in slots:
            continue
        slot = slots[buffer]
        place = (slot.allocation, slot.offset)
        sizes = living.setdefault(place, {})
        before = max(sizes.values(), default=0)
        if proto.integer(1) == _FREE:
            sizes.pop(buffer, None)
        else:
            sizes[buffer] = slot.size
        after = max(sizes.values(), default=0)
        yield Event(buffer, instruction, buffer in sizes, place, after - before, after)


def _merged(traces: list[list[Event]], instructions: Mapping[str, Instruction]) -> list[Event]:
    """The events of several heaps as one sequence, each heap's in its own order."""
    timed = []
    for events in traces:
        now = 0
        for event in events:
            instruction = instructions.get(event.instruction)
            if event.starts and instruction is not None and instruction.position is not None:
                now = max(now, instruction.position)
            timed.append((now, event))
    return [event for _, event in sorted(timed, key=lambda pair: pair[0])]


def _buffer_type(
    location: Message, instructions: Mapping[str, Instruction], names: Mapping[int, str]
) -> str:
    """The type of the array that a buffer holds."""
    name = names.get(location.integer(4), location.text(2))
    if name not in instructions:
        return ""
    shape = instructions[name].shape
    for index in location.integers(3):
        inner = shape.messages(4)
        if index >= len(inner):
            return ""
        shape = inner[index]
    dtype = _DTYPES.get(shape.integer(2))
    return f"{dtype}[{','.join(map(str, shape.integers(3)))}]" if dtype else ""


def module_and_operation(op_name: str) -> tuple[str, str]:
    """Splits an operation's path into the module's path and the operation's own name.

    >>> module_and_operation("jit(step)/transpose(jvp(Net))/Block_0/Dense_1/dot_general")
    ('Net/Block_0/Dense_1', 'dot_general')
    >>> module_and_operation("jit(step)/jvp()/jit(quantize)/mul")
    ('', 'mul')
    >>> module_and_operation(f"jit(step)/jvp()/Net/Dense_1/dot_general/{ENCODE}/jit(quantize)/mul")
    ('Net/Dense_1', 'dot_general, encoded')
    """
    *scopes, operation = op_name.split("/") if op_name else [""]
    path = "/".join(scope for scope in scopes if scope not in _NO_MODULES)
    path = re.sub(r"\bjit\([^()]*\)", "", path)
    # "transpose(jvp(Net))/Block_0" and "jvp()/Block_0" both lose their wrappers.
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", path)) != path:
        path = plain
    parts = [part for part in path.split("/") if re.fullmatch(r"[\w.:\[\]-]+", part)]
    # A block under `jax.checkpoint` is named from its module's root again.
    parts = [part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1]]
    for scope, word in ((ENCODE, "encoded"), (DECODE, "decoded")):
        if scope in parts[1:]:
            *parts, operation = parts[: parts.index(scope)]
            operation += f", {word}"
    return "/".join(parts), operation


# What JAX puts between modules and operations; so are the subscripts of an einsum.
_NO_MODULES = frozenset(
    {
        *("checkpoint", "rematted_computation", "remat2"),
        *("while", "body", "cond", "closed_call", "eval_jaxpr", "shard_map"),
    }
)


_COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"),
    *("collective-broadcast", "ragged-all-to-all", "send", "recv"),
)
# What takes no time of its own: XLA plans it, or it stands for what it calls.
_NO_KERNELS = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("while", "conditional", "call", "opt-barrier", "partition-id", "replica-id"),
        *("add-dependency", "domain"),
    }
)


def collectives(module: bytes) -> dict[str, int]:
    """Counts the operations between devices of a serialized `xla.HloModuleProto`, by kind."""
    counts: dict[str, int] = {}
    for instruction in _scheduled(module):
        # A collective that runs beside others starts and ends in two instructions.
        kind = instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def kernels(module: bytes) -> dict[str, int]:
    """Counts the kernels of a serialized `xla.HloModuleProto`, by name, the most frequent first."""
    counts: dict[str, int] = {}
    for instruction in _scheduled(module):
        kind = instruction.opcode.removesuffix("-start")
        if kind in _NO_KERNELS or kind in _COLLECTIVES or kind.endswith("-done"):
            continue
        name = instruction.custom_call or kind
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _scheduled(module: bytes) -> list[Instruction]:
    instructions, _ = _instructions(Message(module))
    return [i for i in instructions.values() if i.position is not None]
