"""`python -m jact`: its commands, and that it allocates nothing."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from jact import __main__ as command_line

MODULE = """
import jax
import jax.numpy as jnp
import jact


def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def arrays():
    return loss, (jnp.ones((64, 64)), jnp.ones((1024, 64)))


def shapes():
    structs = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 64), (1024, 64)])
    return loss, tuple(structs)


def step():
    gradient, args = jact.grad(loss), arrays()[1]
    return gradient, args


def huge():
    # 4 TiB: to make it is to fail.
    return loss, (jnp.ones((64, 64)), jnp.ones((2**34, 64)))


def sizes(batch, policy):
    return jact.grad(loss, policy=policy), (jnp.ones((64, 64)), jnp.ones((batch, 64)))


def static():
    return (lambda x, mode: x * 2 if mode == "double" else x), (jnp.ones(1024), "double")


def wrong():
    return loss


def flat():
    return loss, *arrays()[1]


def one():
    return loss, jnp.ones((64, 64))


number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_steps.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_steps", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command_line.main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("function", ["arrays", "shapes"])
def test_report(function: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"some_steps:{function}"
    text = run(capsys, "report", name, "--policy", "int8")
    assert "What loss saves for its backward pass, policy int8" in text
    data = json.loads(run(capsys, "report", name, "--json"))
    assert data["policy"] == "int4" and len(data["rows"]) == 4
    assert "int8 takes" in run(capsys, "report", name, "--against", "int8")
    text = run(capsys, "report", name, "--against", "int8", "--peak")
    assert text.count("Peak of the gradient under") == 2
    assert "Compiled peak" in run(capsys, "report", name, "--peak")


def test_peak(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "peak", "some_steps:step")
    assert "temporary" in text and "272.0 KiB" in text
    data = json.loads(run(capsys, "peak", "some_steps:step", "--json"))
    assert data["arguments"] == (64 * 64 + 1024 * 64) * 4
    assert data["in all"] == data["temporary"] + data["arguments"] + data["outputs"]
    assert sum(data["kernels"].values()) > 4
    buffers = run(capsys, "peak", "some_steps:step", "--buffers")
    assert "u4[1024," in buffers and "backward" in buffers


def test_max_batch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("max-batch", "some_steps:sizes", "--memory", "1 MiB", "--tolerance", "0.05")
    assert "Largest size in 1.0 MiB" in run(capsys, *arguments)
    data = json.loads(run(capsys, *arguments, "--policies", "int4", "--json"))
    assert data["results"][0]["policy"] == "int4" and data["results"][0]["size"] > 100


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "GiB" in run(capsys, "report", "some_steps:huge")


def test_other_arguments_are_constants(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, "peak", "some_steps:static", "--json"))
    assert data["outputs"] == data["arguments"] == 4096


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("peak", "some_steps"), "must be given as MODULE:FUNCTION, got 'some_steps'"),
        (("peak", "some_steps:nothing"), "some_steps has no 'nothing'"),
        (("peak", "no_such_module:f"), "No module named 'no_such_module'"),
        (("peak", "some_steps:number"), "must be a function, got int"),
        (("peak", "some_steps:wrong"), "must return a pair (fn, args)"),
        (("peak", "some_steps:flat"), "as in `return step, (params, batch)`; got (function, array"),
        (("report", "some_steps:one"), "args being the tuple of fn's arguments"),
        (("report", "some_steps:arrays", "--policy", "INT4"), 'did you mean "int4"?'),
        (("peak", "some_steps:step", "--target", "h1"), "target must be None, one of"),
        (("max-batch", "some_steps:sizes", "--memory", "much"), "memory must be a number"),
    ],
)
def test_wrong_use(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        command_line.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_program(tmp_path: pathlib.Path) -> None:
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "jact", "peak", "some_steps:step"]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "temporary" in result.stdout
