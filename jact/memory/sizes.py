"""Amounts of memory, as people write them."""

import operator
import re

_UNITS = {
    "B": 1,
    **{prefix + "iB": 2 ** (10 * n) for n, prefix in enumerate("KMGT", 1)},
    **{prefix + "B": 1000**n for n, prefix in enumerate(("k", "M", "G", "T"), 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(size: int | str, argument: str = "size") -> int:
    """Returns the bytes that a size means.

    Args:
        size: a whole number of bytes, or a number and a unit: B, KiB, MiB, GiB, TiB (powers of
            1024), kB, MB, GB, TB (powers of 1000). Capitals make no difference, as in "2 gib".
        argument: what to call the size in messages.

    Raises:
        ValueError: the text is no such size, or the size is not positive.
        TypeError: it is neither a whole number nor a text.

    Example:
        >>> from jact.memory.sizes import parse_size
        >>> parse_size("1.5 KiB"), parse_size("2GB"), parse_size(300)
        (1536, 2000000000, 300)
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ValueError(
                f"{argument} must be bytes, or a number and one of {', '.join(_UNITS)}, "
                f'such as "2 GiB"; got {size!r}'
            )
        nbytes = int(float(match[1]) * units[match[2].lower()])
    else:
        try:
            nbytes = operator.index(size)
        except TypeError:
            raise TypeError(
                f'{argument} must be whole bytes or a text such as "2 GiB", got {size!r}'
            ) from None
    if nbytes <= 0:
        raise ValueError(f"{argument} must be positive, got {size!r}")
    return nbytes


def format_size(nbytes: float) -> str:
    """Returns bytes as people read them.

    Example:
        >>> from jact.memory.sizes import format_size
        >>> format_size(1536), format_size(2**31)
        ('1.5 KiB', '2.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
