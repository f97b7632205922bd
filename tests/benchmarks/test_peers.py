"""The commands that compare with others, at sizes that take no time."""

import ast
import json
import pathlib

import pytest

import benchmarks
from benchmarks import __main__ as command

pytestmark = pytest.mark.standard_promotion


def test_peers_stand_side_by_side(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, out = tmp_path / "torch.json", tmp_path / "out.json"
    row = {"framework": "PyTorch 0", "model": "mlp", "saved_bytes": 1, "relative_error": 0.5}
    other = [
        row | {"policy": "plain", "peak_bytes": 400, "time_ratio": 1.0},
        row | {"policy": "hooks-4bit", "peak_bytes": 100, "time_ratio": 2.0},
    ]
    torch.write_text(json.dumps(other))
    size = ["--model", "mlp", "--batch", "256", "--layers", "2", "--rounds", "1"]
    ways = ["--ways", "plain; checkpoint; int4; int4 + checkpoint"]
    command.main(["peers", *size, *ways, "--torch", str(torch), "--json", str(out)])
    rows = {row["policy"]: row for row in json.loads(out.read_text())}
    assert rows["hooks-4bit"]["peak_ratio"] == 0.25
    assert rows["checkpoint"]["relative_error"] < 1e-6
    assert 1e-4 < rows["int4"]["relative_error"] < 0.1
    assert rows["int4"]["saved_bytes"] < rows["int4"]["peak_bytes"]
    assert "published elsewhere" in capsys.readouterr().err


def test_the_peer_in_pytorch_imports_no_jax() -> None:
    path = pathlib.Path(benchmarks.__file__).parent / "torch_peer.py"
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert "torch" in imported
    assert imported.isdisjoint({"jax", "flax", "jact", "jact_kernels", "benchmarks"})


@pytest.mark.slow
def test_deep_networks_grow_slower_than_plain_ones(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "deep.json"
    size = ["--batch", "16", "--side", "16", "--channels", "4", "--shallow", "2", "--deep", "5"]
    command.main(["deep", *size, "--steps", "1", "--json", str(out)])
    plain, deep_plain, shallow, deep = json.loads(out.read_text())
    assert [row["depth"] for row in (plain, deep_plain, shallow, deep)] == [20, 47, 20, 47]
    assert deep["peak_bytes"] - shallow["peak_bytes"] < 0.3 * (
        deep_plain["peak_bytes"] - plain["peak_bytes"]
    )
    assert len(deep["losses"]) == 1 and 0 < deep["losses"][0] < 10
