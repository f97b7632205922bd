"""Sizes in bytes, written for people and read from what people write."""

import re

_FACTORS = {
    "B": 1,
    **{f"{prefix}iB": 2 ** (10 * i) for i, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 10 ** (3 * i) for i, prefix in enumerate("KMGT", 1)},
}


def format_bytes(size: int) -> str:
    """A size for people.

    >>> format_bytes(512), format_bytes(9216), format_bytes(2**21)
    ('512 B', '9.0 KiB', '2.0 MiB')
    >>> format_bytes(-(2**21))
    '-2.0 MiB'
    """
    if size < 0:
        return f"-{format_bytes(-size)}"
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def parse_bytes(text: int | str, argument: str = "memory") -> int:
    """The number of bytes that a size stands for.

    Args:
        text: bytes, or a number with a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB,
            TB (powers of 1000).
        argument: what an error calls it.

    Returns:
        Whole bytes.

    Raises:
        TypeError: it is neither an integer nor a string.
        ValueError: it is no size, or not positive.

    >>> parse_bytes("16 GiB"), parse_bytes("1.5KB"), parse_bytes(4096)
    (17179869184, 1500, 4096)
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise TypeError(f"{argument} must be a number of bytes or a string, got {text!r}")
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
        units = {unit.upper(): factor for unit, factor in _FACTORS.items()}
        if match is None or (match[2] or "B").upper() not in units:
            raise ValueError(
                f"{argument} must be a number with a unit out of {', '.join(_FACTORS)}, "
                f'such as "16 GiB"; got {text!r}'
            )
        size = int(float(match[1]) * units[(match[2] or "B").upper()])
    if size <= 0:
        raise ValueError(f"{argument} must be more than 0 bytes, got {text!r}")
    return size
