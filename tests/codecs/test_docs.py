"""The examples of docs/codecs.md run."""

import doctest
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def test_codecs_page() -> None:
    results = doctest.testfile(str(ROOT / "docs" / "codecs.md"), module_relative=False)
    assert results.attempted > 5 and results.failed == 0
