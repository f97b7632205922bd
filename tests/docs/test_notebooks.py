"""The notebooks are ready for Colab, and committed without outputs; the docs' build runs them."""

import json
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_ready_to_run(file: pathlib.Path) -> None:
    notebook = json.loads(file.read_text())
    title, *_ = (c for c in notebook["cells"] if c["cell_type"] == "markdown")
    code: list[dict[str, Any]] = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert "".join(title["source"]).startswith("# ")
    install = "".join(code[0]["source"])
    assert 'find_spec("jact") is None' in install and '%pip install -q "jact-jax[' in install
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)


def test_all_are_in_the_docs() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert len(NOTEBOOKS) == 6
    assert all(f"\nnotebooks/{file.stem}\n" in index for file in NOTEBOOKS)
