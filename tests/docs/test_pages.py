"""The pages' code runs as it stands there, block after block."""

import doctest
import pathlib
import re
from typing import Any

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: Pages that are whole programs. The others show fragments of a reader's own.
PROGRAMS = ("start", "policies", "sharding", "migration")


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", PROGRAMS)
def test_programs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    file = DOCS / f"{page}.md"
    text = file.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) > 1
    names: dict[str, Any] = {"__name__": page}
    for block in blocks:
        # Errors then point to the line of the page.
        lines = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(lines, str(file), "exec"), names)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", ["why", "codecs"])
def test_examples(page: str) -> None:
    results = doctest.testfile(str(DOCS / f"{page}.md"), module_relative=False)
    assert results.attempted > 5 and results.failed == 0
