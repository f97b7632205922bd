"""The notebooks are ready for Colab, and committed without outputs; the docs' build runs them."""

import importlib.util
import json
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

#: The first cell of each.
INSTALL = """\
import importlib.util
import pathlib

if importlib.util.find_spec("jact") is None:
    # From the checkout that this notebook lies in; else from PyPI, once jact is published there.
    folders = [pathlib.Path.cwd(), *pathlib.Path.cwd().parents]
    checkout = next((f for f in folders if (f / "jact" / "__init__.py").exists()), "jact-jax")
    %pip install -q "{checkout}[examples]\""""


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_ready_to_run(file: pathlib.Path) -> None:
    notebook = json.loads(file.read_text())
    title, *_ = (c for c in notebook["cells"] if c["cell_type"] == "markdown")
    code: list[dict[str, Any]] = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert "".join(title["source"]).startswith("# ")
    assert "".join(code[0]["source"]) == INSTALL
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)


@pytest.mark.parametrize("in_checkout", [True, False])
def test_what_is_installed_where_jact_is_missing(
    in_checkout: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(NOTEBOOKS[0].parent if in_checkout else tmp_path)
    # IPython, too, puts values of Python's into a command.
    code = INSTALL.replace("%pip install -q ", "installed = f")
    names: dict[str, Any] = {}
    exec(code, names)
    want = ROOT.resolve() if in_checkout else "jact-jax"
    assert names["installed"] == f"{want}[examples]"


def test_all_are_in_the_docs() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert len(NOTEBOOKS) == 6
    assert all(f"\nnotebooks/{file.stem}\n" in index for file in NOTEBOOKS)
