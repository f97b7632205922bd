"""The command that grows models, at sizes that take no time, and the loops that it measures."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import __main__ as command
from benchmarks import scale
from benchmarks.models.mlp import mlp
from benchmarks.models.resnet import like_resnet50, like_resnet152, resnet
from benchmarks.models.task import Task

pytestmark = pytest.mark.standard_promotion


def small(length: int, *, remat: bool, looped: bool) -> Task:
    return mlp(length, 2, "f32", remat)


def test_what_fits_along_an_axis(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"length": scale.Axis(512, 128)}
    monkeypatch.setitem(scale.MODELS, "small", scale.Growing(small, optax.sgd(0.1), axes))
    out = tmp_path / "out.json"
    limits = ["--memory", "8 MiB", "--tolerance", "0.2", "--json", str(out)]
    command.main(["scale", "--model", "small", *limits, "--ways", "plain; int4"])
    rows = {(row["axis"], row["way"]): row for row in json.loads(out.read_text())}
    assert rows.keys() == {(axis, way) for axis in axes for way in ("plain", "int4")}
    for (axis, way), row in rows.items():
        assert row["bytes"] <= row["memory"] == 8 * 2**20
        assert row["size"] % axes[axis].multiple == 0
        larger = [probe for probe in row["probes"] if probe["size"] > row["size"]]
        assert larger and all(probe["bytes"] > row["memory"] for probe in larger)
        assert row["ratio"] == 1 if way == "plain" else row["ratio"] > 1.2


def test_stages() -> None:
    assert like_resnet50(16) == (3, 4, 6, 3) and like_resnet50(33) == (3, 4, 23, 3)
    assert like_resnet50(5) == (3, 2)
    assert like_resnet152(50) == (3, 8, 36, 3) and like_resnet152(10) == (3, 1, 3, 3)
    for blocks in range(10, 500):
        stages = like_resnet152(blocks)
        assert sum(stages) == blocks and min(stages) >= 1


def test_a_loop_of_blocks_is_the_network_written_out() -> None:
    make = functools.partial(resnet, 1, 5, "f32", False, side=32)
    written, looped = make(), make(looped=True)
    params, state, batch = written.arguments()

    def stacked(collection: Any) -> Any:
        blocks = [collection[f"Block_{i}"] for i in range(5)]
        rest = {k: v for k, v in collection.items() if not k.startswith("Block_")}
        both = jax.tree.map(lambda *leaves: jnp.stack(leaves), blocks[1], blocks[2])
        last = jax.tree.map(lambda leaf: leaf[None], blocks[4])
        return rest | {"Block_0": blocks[0], "Stage_0": both, "Block_1": blocks[3], "Stage_1": last}

    same = stacked(params), {"batch_stats": stacked(state["batch_stats"])}, batch
    assert jax.tree.map(jnp.shape, same) == jax.tree.map(lambda leaf: leaf.shape, looped.abstract())
    expected, new_state = jax.jit(written.loss)(params, state, batch)
    loss, looped_state = jax.jit(looped.loss)(*same)
    assert jnp.allclose(loss, expected, rtol=1e-4)
    got = looped_state["batch_stats"]["Stage_0"]
    assert jax.tree.all(
        jax.tree.map(
            functools.partial(jnp.allclose, rtol=1e-3, atol=1e-4),
            got,
            stacked(new_state["batch_stats"])["Stage_0"],
        )
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "transformer_smal"], 'did you mean "transformer_small"?'),
        (["--policies", "off,INT4"], 'did you mean "int4"?'),
    ],
)
def test_unknown_names(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["peak", *arguments])
    assert message in capsys.readouterr().err
