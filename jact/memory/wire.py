"""Reads the wire format of protocol buffers, without their schema.

XLA writes what it knows about a compiled program as protocol buffers, but no package that JAX
depends on brings their classes. The wire format is small: a message is a sequence of fields, each
a number, a kind and a value (protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Message:
    """One message: the values of its fields, by field number.

    Fields that are absent have their type's default, as in every proto3 message. Numbers that no
    accessor asks for are of no consequence, so messages of newer schemas can be read.

    Args:
        data: the message as it was serialized.

    Raises:
        ValueError: `data` ends inside a field, or has a field of an unknown kind.

    >>> message = Message(bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi")
    >>> message.integer(1), message.text(2), message.integer(3)
    (150, 'hi', 0)
    """

    def __init__(self, data: bytes):
        self._fields: dict[int, list[int | bytes]] = {}
        for number, value in _fields(data):
            self._fields.setdefault(number, []).append(value)

    def integer(self, number: int) -> int:
        """A number, boolean or enumeration; 0 if absent. Negative ones are not supported."""
        value = self._last(number, 0)
        if not isinstance(value, int):
            raise ValueError(f"field {number} is no integer")
        return value

    def text(self, number: int) -> str:
        """A string; empty if absent."""
        return self._bytes(number).decode("utf-8", errors="replace")

    def message(self, number: int) -> Message:
        """A message; an empty one if absent."""
        return Message(self._bytes(number))

    def messages(self, number: int) -> list[Message]:
        """A repeated message."""
        return [
            Message(value) for value in self._fields.get(number, []) if isinstance(value, bytes)
        ]

    def integers(self, number: int) -> list[int]:
        """A repeated integer, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                item, at = _varint(value, at)
                found.append(item)
        return found

    def has(self, number: int) -> bool:
        """Whether a field is present."""
        return number in self._fields

    def _bytes(self, number: int) -> bytes:
        value = self._last(number, b"")
        if not isinstance(value, bytes):
            raise ValueError(f"field {number} is no string or message")
        return value

    def _last(self, number: int, default: int | bytes) -> int | bytes:
        # Of a field that is not repeated the last value counts.
        return self._fields.get(number, [default])[-1]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"the message has a field of kind {kind}, which is unknown")
        if at + size > len(data):
            raise ValueError("the message ends inside a field")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer that starts at a position, and the position behind it."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("the message ends inside a field")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
