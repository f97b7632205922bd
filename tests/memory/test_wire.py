"""The reader of protocol buffers, against messages written by hand and by google's own library."""

import pytest

from jact.memory.wire import Message


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**32 + 5, 2**63 - 1])
def test_integers(value: int) -> None:
    for number in (1, 15, 16, 300):
        assert Message(field(number, value)).integer(number) == value


def test_text_messages_and_defaults() -> None:
    inner = field(1, 7) + field(2, "größer".encode())
    message = Message(
        field(3, inner) + field(3, field(1, 8)) + field(4, b"last") + field(4, b"won")
    )
    assert [m.integer(1) for m in message.messages(3)] == [7, 8]
    assert message.messages(3)[0].text(2) == "größer"
    assert message.message(3).integer(1) == 8
    assert message.text(4) == "won"
    assert (message.integer(9), message.text(9), message.messages(9)) == (0, "", [])
    assert not message.message(9).has(1)
    assert message.has(3) and not message.has(9)


def test_repeated_integers_packed_or_not() -> None:
    values = [0, 5, 300, 2**40]
    packed = field(1, b"".join(map(varint, values)))
    apart = b"".join(field(1, value) for value in values)
    assert Message(packed).integers(1) == Message(apart).integers(1) == values
    assert Message(packed + apart).integers(1) == values * 2
    assert Message(b"").integers(1) == []


def test_kinds_that_nobody_asks_for_are_skipped() -> None:
    fixed64 = varint(5 << 3 | 1) + bytes(8)
    fixed32 = varint(6 << 3 | 5) + bytes(4)
    assert Message(fixed64 + fixed32 + field(7, 3)).integer(7) == 3


@pytest.mark.parametrize("data", [b"\x08", b"\x08\x80", b"\x12\x05ab", b"\x09\x00\x00", b"\x80"])
def test_a_message_that_ends_too_early(data: bytes) -> None:
    with pytest.raises(ValueError, match="ends inside a field"):
        Message(data)


def test_unknown_kinds_and_wrong_types() -> None:
    with pytest.raises(ValueError, match="kind 3"):
        Message(b"\x0b")
    message = Message(field(1, 5) + field(2, b"text"))
    with pytest.raises(ValueError, match="field 2 is no integer"):
        message.integer(2)
    with pytest.raises(ValueError, match="field 1 is no string"):
        message.text(1)


def test_agrees_with_googles_library() -> None:
    descriptor = pytest.importorskip("google.protobuf.descriptor_pb2")
    proto = descriptor.FileDescriptorProto(name="a.proto", package="p", dependency=["x", "y"])
    proto.message_type.add(name="M").field.add(name="f", number=300, json_name="g")
    message = Message(proto.SerializeToString())
    assert (message.text(1), message.text(2)) == ("a.proto", "p")
    (inner,) = message.messages(4)
    assert inner.text(1) == "M"
    assert inner.messages(2)[0].integer(3) == 300
