"""Names of values: the modules that an equation belongs to, and the numbers of equal names."""

from __future__ import annotations

import re

from jact import compat
from jact.engine.program import Equation


def numbered(base: str, count: int) -> str:
    """The name of what comes after `count` others of the same base name."""
    return f"{base}:{count}" if count else base


def module_path(eqn: Equation) -> str:
    """The name scopes of an equation, without JAX's transformations; empty or ending in a slash."""
    return scope_path(compat.name_scopes(eqn.source_info))


def scope_path(scopes: str) -> str:
    """A name stack without JAX's transformations; empty or ending in a slash."""
    # "transpose(jvp(Model))/Block_0" and "jvp()/Block_0" both lose their wrappers.
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", scopes)) != scopes:
        scopes = plain
    return "".join(part + "/" for part in scopes.split("/") if part)
