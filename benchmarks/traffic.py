"""The bytes that a compiled program moves between memory and its kernels, from the program's text.

Every instruction of the entry computation that is no mere view is one kernel. It is taken to read
each operand once and to write its result once. Where a kernel reads part of an operand, this is too
much; where it reads one twice, too little. What a TPU keeps on the chip costs nothing.
"""

import dataclasses
import re

_VIEWS = frozenset({"bitcast", "constant", "get-tuple-element", "parameter", "tuple"})
"""Instructions that move nothing."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<sizes>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one run of a program moves.

    Attributes:
        bytes: Read and written in the device's memory.
        kernels: How many kernels there are.
    """

    bytes: int
    kernels: int


def traffic(text: str) -> Traffic:
    """Counts the traffic of a compiled program.

    Args:
        text: What `compiled.as_text()` returns.
    """
    sizes: dict[str, int] = {}
    moved, kernels = 0, 0
    for line in _entry(text):
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        shape, opcode, operands = _parse(match["rest"])
        sizes[match["name"]] = size = sum(map(_nbytes, _ARRAY.finditer(shape)))
        if opcode in _VIEWS or opcode.endswith("-done"):
            continue
        read = sum(sizes.get(name, 0) for name in dict.fromkeys(operands))
        if opcode.endswith("-start"):
            # Its result is the pair of what is copied and what it is copied to.
            size, kernels = size - read, kernels - 1
        if read or size:
            moved += read + size
            kernels += 1
    return Traffic(bytes=moved, kernels=kernels)


def _entry(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("}"))
    return lines[start + 1 : end]


def _parse(rest: str) -> tuple[str, str, list[str]]:
    """The result's shape, the opcode and the operands' names, from what follows the equals sign."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[end + 1 :].partition("(")
    start = rest.index("(", end + 1)
    arguments = rest[start + 1 : _closing(rest, start)]
    return rest[:end], opcode.strip(), re.findall(r"%([^\s,)]+)", arguments)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in {text!r}")


def _nbytes(array: re.Match[str]) -> int:
    """The bytes of an array in the device's main memory, its padding left out of account."""
    space = _MEMORY_SPACE.search(array["layout"] or "")
    if space is not None and space[1] != "0":
        return 0
    elements = 1
    for size in filter(None, array["sizes"].split(",")):
        elements *= int(size)
    bits = _BITS.search(array["dtype"])
    return -(-elements * (int(bits[0]) if bits else 8) // 8)
