"""The API reference has every public name, and nothing that does not exist."""

import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

REFERENCE = pathlib.Path(__file__).parents[2] / "docs" / "api"
MODULES = (
    "jact",
    "jact.adapt",
    "jact.codecs",
    "jact.memory",
    "jact.nnx",
    "jact.presets",
    "jact.testing",
    "jact_kernels",
)
DIRECTIVE = re.compile(
    r"^\.\. (auto(?:function|class|data|exception)|py:data|currentmodule):: (\S+)$"
)


def entries() -> Iterator[tuple[str, str, str]]:
    """The module, the name and the directive of each entry of the reference."""
    for page in sorted(REFERENCE.glob("*.md")):
        module = ""
        for line in page.read_text().splitlines():
            if (found := DIRECTIVE.match(line)) is None:
                continue
            directive, name = found.groups()
            if directive == "currentmodule":
                module = name
            elif "." in name:
                yield *name.rsplit(".", 1), directive
            else:
                yield module, name, directive


ENTRIES = sorted(entries())


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(module: str) -> None:
    public = importlib.import_module(module)
    documented = [getattr(importlib.import_module(m), name) for m, name, _ in ENTRIES]
    missing = [
        name
        for name in public.__all__
        if not any(getattr(public, name) is thing for thing in documented)
        and not is_documented_module(getattr(public, name))
    ]
    assert not missing


def is_documented_module(thing: Any) -> bool:
    return isinstance(thing, ModuleType) and thing.__name__ in MODULES


@pytest.mark.parametrize(("module", "name", "directive"), ENTRIES)
def test_every_entry_exists_and_says_something(module: str, name: str, directive: str) -> None:
    thing = getattr(importlib.import_module(module), name)
    data = not inspect.isclass(thing) and not inspect.isfunction(thing)
    kinds = {
        "autofunction": inspect.isfunction(thing),
        "autoexception": inspect.isclass(thing) and issubclass(thing, Exception),
        "autoclass": inspect.isclass(thing) and not issubclass(thing, Exception),
        "autodata": data,
        "py:data": data,
    }
    assert kinds[directive]
    assert data or inspect.getdoc(thing)


def test_no_name_is_there_twice() -> None:
    things = [f"{module}.{name}" for module, name, _ in ENTRIES]
    assert len(things) == len(set(things)) > 50
