"""The commands that no other test runs, each on a network that takes no time."""

import json
import math
import pathlib
from typing import Any

import pytest

from benchmarks import __main__ as command
from tests.compilation import compiled_into

pytestmark = pytest.mark.standard_promotion

MLP = ["--model", "mlp", "--batch", "64", "--layers", "2"]
#: What each is called with, and figures of its rows that are positive numbers.
COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "adaptive": (
        ["--bits", "3", "--draws", "1", "--repeats", "1", "--steps", "2"],
        ("uniform_error", "ratio", "bound", "prediction", "probe_steps", "longest_step"),
    ),
    "sensitivity": (["--codecs", "int4"], ()),
    "max_batch": (["--policies", "int4", "--memory", "4 MiB", "--tolerance", "0.5"], ("bytes",)),
    "time": (["--policies", "off,int4", "--rounds", "1"], ()),
    "choose": (["--policies", "off,int4", "--rounds", "1"], ()),
    "frontier": (["--policies", "int8,int4"], ()),
    "timeline": (["--policies", "int4"], ()),
    "fidelity": (["--policies", "int4", "--draws", "1"], ()),
}


@pytest.fixture(autouse=True)
def _compile_quickly(compiled: str) -> Any:
    with compiled_into(compiled):
        yield


@pytest.mark.parametrize("name", COMMANDS)
def test_runs(name: str, tmp_path: pathlib.Path) -> None:
    arguments, figures = COMMANDS[name]
    out = tmp_path / "out.json"
    command.main([name, *MLP, *arguments, "--json", str(out)])
    rows = json.loads(out.read_text())
    assert rows and all(row["model"] == "mlp" for row in rows)
    for row in rows:
        assert all(math.isfinite(row[figure]) and row[figure] > 0 for figure in figures)
