"""What a user may have meant by a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """The end of a message on an unknown name: the nearest of the names that there are.

    Args:
        name: what was given; anything but a string is like none of them.
        allowed: the names.

    Returns:
        A text such as `'; did you mean "int4"?'`; empty where no name is alike. Case is ignored.

    >>> did_you_mean("INT4", ["int8", "int4"])
    '; did you mean "int4"?'
    >>> did_you_mean("resnet", ["int8", "int4"])
    ''
    """
    if not isinstance(name, str):
        return ""
    by_folded = {other.casefold(): other for other in allowed}
    near = difflib.get_close_matches(name.strip().casefold(), by_folded, n=1)
    return f'; did you mean "{by_folded[near[0]]}"?' if near else ""


def must_be_one_of(
    name: object, allowed: Iterable[str], others: str = "", hint: str | None = None
) -> str:
    """The end of a message on a name that is not among those there are.

    Args:
        name: what was given.
        allowed: the names.
        others: what else is allowed, as in `", or a codec"`.
        hint: the end; None is the nearest name.

    >>> print("codec", must_be_one_of("INT4", ["int8", "int4"], ", or a codec"))
    codec must be one of int8, int4, or a codec; got 'INT4'; did you mean "int4"?
    """
    allowed = list(allowed)
    hint = did_you_mean(name, allowed) if hint is None else hint
    return f"must be one of {', '.join(allowed)}{others}; got {name!r}{hint}"
