"""Sizes as people write and read them."""

from typing import Any

import pytest

from jact.memory.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("16 GiB", 16 * 2**30),
        ("16GB", 16 * 10**9),
        (" 1.5 kib ", 1536),
        ("2 TiB", 2**41),
    ],
)
def test_what_people_write(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "16 GB extra", "16 gigabytes", "-3 GiB", "0 B", 0, -1])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="budget must be"):
        parse_bytes(text, "budget")


@pytest.mark.parametrize("text", [None, 1.5, True, [1]])
def test_what_is_neither_a_number_nor_text(text: Any) -> None:
    with pytest.raises(TypeError, match="memory must be a number of bytes or a string"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [1, 1000, 1024, 2**20, 3 * 2**30, 5 * 2**40])
def test_what_is_printed_can_be_read(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)
    assert format_bytes(-size) == f"-{format_bytes(size)}"
