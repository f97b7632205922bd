"""The accuracy command: it resumes, compares seed by seed, and says what is missing."""

import json
import pathlib
import re

import pytest

from benchmarks import __main__ as command
from benchmarks import accuracy, accuracy_table, data
from benchmarks.experiments import EXPERIMENTS

pytestmark = pytest.mark.standard_promotion

TINY = ["--tasks", "graph_gcn", "--steps", "3", "--seeds", "2", "--policies", "off,int4"]


def test_a_run_is_resumed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, table, picture = tmp_path / "r.jsonl", tmp_path / "t.md", tmp_path / "p.png"
    arguments = ["accuracy", *TINY, "--results", str(results)]
    command.main(arguments)
    lines = results.read_text().splitlines()
    assert [(r["policy"], r["seed"]) for r in map(json.loads, lines)] == [
        ("off", 0),
        ("off", 1),
        ("int4", 0),
        ("int4", 1),
    ]
    # The one that is missing runs, with the same result.
    results.write_text("\n".join(lines[:3]) + "\n")
    capsys.readouterr()
    command.main([*arguments, "--markdown", str(table), "--plot", str(picture)])
    again = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(again) == 4 and again[3]["accuracy"] == json.loads(lines[3])["accuracy"]
    assert "seed 0" not in capsys.readouterr().err
    assert re.search(r"plain JAX, % \| \d+\.\d\d ± ", table.read_text())
    assert picture.stat().st_size > 1000
    # With another number of steps, they are other results.
    assert accuracy.load(results, {"graph_gcn": EXPERIMENTS["graph_gcn"]}) == {}


def test_differences_are_taken_seed_by_seed() -> None:
    def runs(*values: float) -> dict[int, dict[str, float]]:
        return {seed: {"accuracy": v, "seconds": 1.0} for seed, v in enumerate(values)}

    both = {("graph_gcn", "off"): runs(90.0, 94.0), ("graph_gcn", "int4"): runs(89.0, 93.0)}
    row = accuracy.summary("graph_gcn", "int4", both, EXPERIMENTS["graph_gcn"])
    assert (row["mean"], row["error"]) == (91.0, 2.0)
    assert (row["difference"], row["difference_error"]) == (-1.0, 0.0)
    assert "| `int4` | -1.00 ± 0.00 |" in accuracy_table.markdown([row])


def test_pooled_policies_are_for_feature_maps() -> None:
    applies = {
        (task, policy)
        for task, experiment in EXPERIMENTS.items()
        for policy in ("pool2", "pool2-tokens", "int4")
        if accuracy.applies(policy, experiment)
    }
    assert ("fashion_resnet20", "pool2") in applies and ("graph_gcn", "pool2") not in applies
    assert ("text_transformer", "pool2-tokens") in applies
    assert ("fashion_resnet20", "pool2-tokens") not in applies


def test_missing_data_say_how_to_get_them(tmp_path: pathlib.Path) -> None:
    with pytest.raises(data.MissingDataError, match="apt install dataset-fashion-mnist"):
        data.fashion_mnist(tmp_path)
