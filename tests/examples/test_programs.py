"""The example programs: a few steps each, and a resumed run goes on as an uninterrupted one."""

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compilation import compiled_into

ROOT = pathlib.Path(__file__).parents[2]

#: The programs, and what makes them small: they compile four times each.
PROGRAMS: dict[str, dict[str, Any]] = {
    "image_classification": {"FASHION": pathlib.Path("nowhere"), "CHANNELS": (8, 16), "BATCH": 16},
    "language_model": {"LAYERS": 1, "WIDTH": 64, "BATCH": 4},
    "graph_network": {"LAYERS": 4, "WIDTH": 32},
}


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """LLVM need not optimise, and what one run has compiled the next one reads from a folder."""
    with compiled_into(str(tmp_path_factory.mktemp("compiled"))):
        yield


def lines(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", PROGRAMS)
def test_compares_and_resumes(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    program = importlib.import_module(name)
    for constant, value in PROGRAMS[name].items():
        monkeypatch.setattr(program, constant, value)

    def run(log: str, steps: int, *more: str) -> list[dict[str, Any]]:
        program.main(["--steps", str(steps), "--log", str(tmp_path / log), *more])
        return lines(tmp_path / log)

    whole = run("whole", 4)
    plain = [x["loss"] for x in whole if x["policy"] == "off" and "loss" in x]
    ours = [x["loss"] for x in whole if x["policy"] == "int4" and "loss" in x]
    assert len(plain) == len(ours) == 4
    # The first loss is that of the same parameters, and the forward pass is exact.
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert ours[-1] == pytest.approx(plain[-1], rel=0.1)
    peaks = {x["policy"]: x["peak MiB"] for x in whole if "peak MiB" in x}
    assert peaks["int4"] < 0.6 * peaks["off"]

    folder = ("--checkpoints", str(tmp_path / "checkpoints"), "--no-comparison")
    run("parts", 2, *folder)
    parts = run("parts", 4, *folder)
    assert [x["loss"] for x in parts if "loss" in x] == ours
    assert [x["step"] for x in parts if "loss" in x] == [0, 1, 2, 3]


def test_an_interrupted_run_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    training = importlib.import_module("training")

    @jax.jit
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        return {"sum": state["sum"] + batch}, state["sum"].sum()

    def batch(number: int) -> Any:
        if number == 3:
            raise KeyboardInterrupt
        return jnp.ones(2)

    task = training.Task(
        title="a sum",
        init=lambda: {"sum": jnp.zeros(2)},
        make_step=lambda policy: step,
        batch=batch,
        evaluate=lambda state: {"sum": float(state["sum"].sum())},
    )
    folder = ["--checkpoints", str(tmp_path / "checkpoints"), "--save-every", "2"]
    log = tmp_path / "log"
    logged = [*folder, "--no-comparison", "--log", str(log)]
    for more, words in (
        ([], "Nothing was saved"),
        (logged, "same command again resumes from the last checkpoint"),
    ):
        with pytest.raises(SystemExit) as caught:
            training.run(task, training.parse("", more, steps=5))
        assert caught.value.code == 130
        assert words in capsys.readouterr().err
    # The third step was logged, but came after the checkpoint.
    assert [x["step"] for x in lines(log)] == [0, 1, 2]
    once_more = dataclasses.replace(task, batch=lambda number: jnp.ones(2))
    training.run(once_more, training.parse("", logged, steps=5))
    assert [x["step"] for x in lines(log) if "loss" in x] == [0, 1, 2, 3, 4]
