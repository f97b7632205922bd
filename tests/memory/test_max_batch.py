"""The largest batch: what fits, fits by the compiler's own figures, and the next size does not."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jact
import jact.memory


def make_step(batch: int, policy: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jact.grad(loss, policy=policy)(w, x)

    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    return jax.jit(step, donate_argnums=0), (w, x)


MEMORY = 4 * 2**20


@pytest.fixture(scope="module")
def found() -> jact.memory.MaxBatch:
    return jact.memory.max_batch(make_step, "4 MiB", multiple=16, progress=False)


def total(batch: int, policy: str) -> int:
    step, args = make_step(batch, policy)
    analysis = jact.memory.analyze(step, *args)
    donated = analysis.argument_bytes + analysis.temp_bytes
    assert analysis.alias_bytes == analysis.output_bytes == 64 * 64 * 4
    assert analysis.total_bytes == donated
    return analysis.total_bytes


@pytest.mark.parametrize("policy", ["off", "int4"])
def test_fits_and_the_next_does_not(found: jact.memory.MaxBatch, policy: str) -> None:
    assert total(found[policy], policy) <= MEMORY < total(found[policy] + 16, policy)
    (result,) = (r for r in found.results if r.policy == policy)
    assert result.bytes == total(found[policy], policy)
    assert result.too_large == found[policy] + 16
    assert len(result.probes) <= 6


def test_compressed_fits_more(found: jact.memory.MaxBatch) -> None:
    assert found["int4"] > 1.2 * found["off"]
    ratio = found.ratio("int4")
    assert ratio == found["int4"] / found["off"]
    with pytest.raises(KeyError, match="policy must be one of off, int4; got 'int8'"):
        found["int8"]


def test_is_a_table_records_and_json(found: jact.memory.MaxBatch) -> None:
    text = str(found)
    html = found._repr_html_()
    for shown in (text, html):
        assert "Largest size in 4.0 MiB" in shown
        assert all(str(found[policy]) in shown for policy in ("off", "int4"))
    assert html.count("<tr>") == 3
    records = found.records()
    assert [record["policy"] for record in records] == ["off", "int4"]
    assert records[0]["ratio"] == 1.0
    data = json.loads(json.dumps(found.to_json()))
    assert data["memory"] == MEMORY
    assert data["results"][1]["size"] == found["int4"]


def test_a_notebook_without_widgets_sees_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = jact.memory.max_batch(make_step, "4 MiB", policies=["off"], multiple=512, limit=512)
    assert found["off"] == 512


def test_any_integer_and_any_policy() -> None:
    seen = []

    def make(layers: int, policy: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        seen.append(policy)

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = jnp.tanh(x @ w)
            return jnp.sum(x)

        x = jax.ShapeDtypeStruct((1024, 32), jnp.float32)
        gradient = jact.grad(loss, policy=policy) if policy != "mine" else jax.grad(loss)
        return gradient, (jax.ShapeDtypeStruct((32, 32), jnp.float32), x)

    result = jact.memory.max_batch(
        make,
        2**20,
        policies={"plain": "mine", "bits": jact.Policy(default="int8")},
        start=2,
        limit=16,
        progress=False,
    )
    assert [r.policy for r in result.results] == ["plain", "bits"]
    assert 0 < result["plain"] < result["bits"]
    assert {"mine", jact.Policy(default="int8")} == set(seen)


def test_none_fits() -> None:
    result = jact.memory.max_batch(make_step, "20 KiB", policies="off", progress=False)
    assert result["off"] == 0 and result.ratio("off") is None
    assert result.results[0].too_large == 1
    assert str(result)


def test_errors_of_a_step_are_not_hidden() -> None:
    def make(size: int, policy: str) -> Any:
        raise RuntimeError("of my own")

    with pytest.raises(RuntimeError, match="of my own"):
        jact.memory.max_batch(make, "1 GiB", progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0}, "start must be at least 1, got 0"),
        ({"multiple": 0}, "multiple must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"limit": 4, "multiple": 8}, "limit must be at least multiple, got 4 and 8"),
        ({"tolerance": -0.1}, "tolerance must not be negative"),
        ({"policies": []}, "policies must name at least one"),
        ({"memory": "much"}, "memory must be a number with a unit"),
    ],
)
def test_wrong_use(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jact.memory.max_batch(make_step, **({"memory": "1 GiB", "progress": False} | options))


def test_a_size_that_is_not_compiled_is_too_large() -> None:
    def refusing(batch: int, policy: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        step, args = make_step(batch, policy)
        unknown = jax.ffi.ffi_call("jact_unknown", jax.ShapeDtypeStruct((), jnp.float32))
        return (step if batch < 20 else jax.jit(lambda w, x: unknown(x))), args

    found = jact.memory.max_batch(refusing, "4 MiB", policies=["off"], progress=False)
    assert found["off"] == 19
    assert any(line.startswith("off: XLA does not compile ") for line in str(found).splitlines())
    assert "jact_unknown" in str(found)
    with pytest.raises(jax.errors.JaxRuntimeError, match="jact_unknown") as raised:
        jact.memory.max_batch(refusing, "4 MiB", policies=["off"], start=40, progress=False)
    assert "size 40" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("result", "got"),
    [(3, "got int"), ((None, ()), r"got \(NoneType, tuple\)"), ((jnp.sin, jnp.ones(3)), "array")],
)
def test_make_step_must_return_a_pair(result: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"make_step must return a pair \(fn, args\).*{got}"):
        jact.memory.max_batch(lambda size, policy: result, "1 MiB", progress=False)
