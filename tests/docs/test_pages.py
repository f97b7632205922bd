"""The pages' code runs as it stands there, block after block."""

import doctest
import json
import pathlib
import re
import shlex
import sys
from typing import Any

import pytest

from jact import __main__ as command_line

DOCS = pathlib.Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: Pages that are whole programs. The others show fragments of a reader's own.
PROGRAMS = ("start", "policies", "sharding", "migration")


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", PROGRAMS)
def test_programs(
    page: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They run, and print what the page says that they print, in the blocks of no language."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    file = DOCS / f"{page}.md"
    text = file.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) > 1
    names: dict[str, Any] = {"__name__": page}
    for block in blocks:
        # Errors then point to the line of the page.
        lines = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(lines, str(file), "exec"), names)
    printed = normalised(capsys.readouterr().out)
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shown = normalised("".join(block for language, block in fences if not language))
    assert (len(shown) > 9) == (page == "start")
    assert [line for line in shown if line not in printed] == []


def normalised(text: str) -> list[str]:
    """Lines without the place in a file, and without what differs between machines of an error."""
    text = re.sub(r"\S+:\d+( \(.*?\))?(?= +f32)", "file:line", text)
    text = re.sub(r"0\.0\d\d\b", "0.0", text)
    lines = (" ".join(line.replace("─", "").split()) for line in text.splitlines())
    return [line for line in lines if line and line != "..."]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("page", ["why", "codecs"])
def test_examples(page: str) -> None:
    results = doctest.testfile(str(DOCS / f"{page}.md"), module_relative=False)
    assert results.attempted > 5 and results.failed == 0


def test_the_command_lines_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train.py` of docs/memory.md serves the three commands that stand below it."""
    text = (DOCS / "memory.md").read_text().partition("## From the command line")[2]
    (file,) = BLOCK.findall(text)
    commands = re.findall(r"^python -m jact (.*)$", text, re.MULTILINE)
    assert [shlex.split(command)[0] for command in commands] == ["report", "peak", "max-batch"]
    (tmp_path / "train.py").write_text(file.replace("4096", "256").replace("512", "64"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    for command in commands:
        arguments = shlex.split(command.replace("1 GiB", "1 MiB"))
        assert command_line.main([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
