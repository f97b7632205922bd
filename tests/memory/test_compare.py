"""Reports by group, side by side, as a difference, and what they advise."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
import rich.console

import jact
from benchmarks.models import MODELS
from jact import Report
from jact.memory.report import Peak

W, X = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(64, 64), (1024, 64)])


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def of_model(policy: object, model: str = "convnet_small") -> Report:
    task = MODELS[model].task(batch=16, layers=2)
    return jact.report(task.loss, policy, has_aux=True)(*task.abstract())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def int4() -> Report:
    return of_model("int4")


@pytest.fixture(scope="module")
def int8() -> Report:
    return of_model("int8")


class TestGroups:
    @pytest.mark.parametrize("by", ["module", "kind", "codec", "why"])
    def test_add_up_and_are_sorted(self, int4: Report, by: str) -> None:
        groups = int4.groups(by)
        assert sum(g.saved_bytes for g in groups) == int4.saved_bytes
        assert sum(g.bytes for g in groups) == sum(row.bytes for row in int4.rows)
        assert sum(g.values for g in groups) == len(int4.rows)
        sizes = [g.saved_bytes for g in groups]
        assert sizes == sorted(sizes, reverse=True)

    def test_modules_at_a_depth(self, int4: Report) -> None:
        names = {g.name for g in int4.groups("module", depth=2)}
        assert {"ConvNet/Block_0", "ConvNet/Block_1", "ConvNet/Conv_0"} <= names
        assert max(name.count("/") for name in names) == 1
        deep = {g.name for g in int4.groups("module")}
        assert "ConvNet/Block_0/Conv_1" in deep

    def test_wrong_use(self, int4: Report) -> None:
        with pytest.raises(ValueError, match="by must be one of module, kind, codec, why; got 'x'"):
            int4.groups("x")
        with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
            int4.groups(depth=0)

    def test_kinds(self, int4: Report) -> None:
        kinds = {row.kind for row in int4.rows}
        assert kinds == {"code", "mask", "small"}
        for row in int4.rows:
            assert (row.kind == "code") == (not row.exact)
            assert (row.kind == "mask") == (row.dtype == "bool")
        kept = jact.report(loss, jact.Policy(rules=[jact.Rule("*", "keep")]))(W, X)
        assert {row.kind for row in kept.rows} == {"activation"}
        off = {row.kind for row in of_model("off").rows}
        assert {"activation", "mask", "small"} <= off and "code" not in off

    @pytest.mark.parametrize("policy", ["off", "int4"])
    def test_what_is_made_of_weights_is_a_parameter(self, policy: str) -> None:
        def lora(params: list[jax.Array], x: jax.Array) -> jax.Array:
            a, b = params
            return jnp.sum(jnp.tanh(x @ jnp.tanh(a @ b)))

        params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 64), (64, 64)]]
        kinds = {row.kind for row in jact.report(lora, policy)(params, X).rows}
        assert "parameter" in kinds


class TestRecords:
    def test_are_plain_values(self, int4: Report) -> None:
        records = int4.records()
        assert len(records) == len(int4.rows)
        assert records == json.loads(json.dumps(records))
        assert {"name", "module", "kind", "codec", "bytes", "saved_bytes"} <= records[0].keys()
        row = next(r for r in records if r["name"] == "ConvNet/Block_0/Conv_1/conv_general_dilated")
        assert row["module"] == "ConvNet/Block_0/Conv_1"

    def test_pandas_takes_them(self, int4: Report) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(int4.records())
        assert frame.groupby("kind").saved_bytes.sum().sum() == int4.saved_bytes


class TestComparison:
    def test_side_by_side(self, int4: Report, int8: Report) -> None:
        both = int8.compare(int4)
        assert both.labels == ("int8", "int4")
        records = {record["name"]: record for record in both.records()}
        assert len(records) == len({row.name for report in (int4, int8) for row in report.rows})
        for report, label in ((int8, "int8"), (int4, "int4")):
            total = sum(record[f"saved_bytes ({label})"] for record in records.values())
            assert total == report.saved_bytes
        assert sum(r["change"] for r in records.values()) == int4.saved_bytes - int8.saved_bytes
        conv = records["ConvNet/Block_0/Conv_1/conv_general_dilated"]
        assert (conv["codec (int8)"], conv["codec (int4)"]) == ("int8", "int4")

    def test_a_difference_leaves_out_what_is_alike(self, int4: Report, int8: Report) -> None:
        difference = int4 - int8
        assert difference.labels == ("int8", "int4")
        records = difference.records()
        assert records and all(record["change"] < 0 for record in records)
        assert len(records) == sum(row.kind == "code" for row in int4.rows)
        changes = [abs(record["change"]) for record in records]
        assert changes == sorted(changes, reverse=True)
        assert (int4 - int4).records() == []
        assert "int4 takes as much as" in str(int4 - dataclasses.replace(int4, policy="same"))

    def test_what_is_saved_in_one_alone(self, int4: Report) -> None:
        off = of_model("off")
        records = (int4 - off).records()
        only = [record for record in records if record["codec (int4)"] is None]
        assert only and all(record["saved_bytes (int4)"] == 0 for record in only)

    def test_prints(self, int4: Report, int8: Report, monkeypatch: pytest.MonkeyPatch) -> None:
        for columns in (80, 200):
            monkeypatch.setenv("COLUMNS", str(columns))
            text = str(int4 - int8)
            assert max(map(len, text.splitlines())) <= columns
            assert "in all" in text and "int4 takes" in text and "less than int8." in text
            assert "…" not in text
        peak = Peak(plain_bytes=2**23, bytes=2**20)
        measured = dataclasses.replace(int4, peak=peak).compare(int8)
        assert "Peak of the gradient under int4: 1.0 MiB, under plain JAX 8.0 MiB." in str(measured)
        assert measured.to_json()["peak_bytes"] == {"int4": 2**20}
        console = rich.console.Console(width=120, record=True, quiet=True)
        console.print(int4.compare(int8))
        html = int4.compare(int8)._repr_html_()
        assert html.count("<table>") == html.count("</table>") == 1
        assert "int8 takes" in html and "more than int4." in html
        assert json.loads(json.dumps(int4.compare(int8).to_json()))["saved_bytes"] == {
            "int4": int4.saved_bytes,
            "int8": int8.saved_bytes,
        }

    def test_labels_differ(self, int4: Report) -> None:
        assert int4.compare(int4).labels == ("loss, int4 (1)", "loss, int4 (2)")
        other = dataclasses.replace(int4, function="other")
        assert int4.compare(other).labels == ("loss, int4", "other, int4")

    def test_needs_another_report(self, int4: Report) -> None:
        with pytest.raises(ValueError, match="another report to compare with"):
            int4.compare()
        with pytest.raises(TypeError):
            int4 - 3  # type: ignore[operator]


class TestAdvice:
    def test_says_what_fewer_bits_would_take(self) -> None:
        report = jact.report(loss, "int8")(W, X)
        plan = jact.make_plan(loss, "int8")(W, X)
        names = [row.name for row in report.rows if row.kind == "code"]
        then = jact.report(loss, plan.replace(dict.fromkeys(names, "int4")))(W, X)
        less = report.saved_bytes - then.saved_bytes
        assert less == 3 * 1024 * 64 // 2
        assert "in int4 instead of int8 would take 96.0 KiB less" in str(report)

    def test_says_what_is_kept(self) -> None:
        policy = jact.Policy(rules=[jact.Rule("dot_general:1", "keep")], default="int4")
        text = " ".join(str(jact.report(loss, policy)(W, X)).split())
        assert "Next: the activation kept as it is (256.0 KiB) could be encoded" in text
        # The rule's value and what follows from it are exact, so that either may be saved.
        assert "the largest is tanh (follows from exact values)" in text

    def test_says_nothing_of_plain_jax_or_where_nothing_is_left(self) -> None:
        assert "Next:" not in str(jact.report(loss, "off")(W, X))
        assert "Next:" not in str(jact.report(loss, "int1")(W, X))

    @pytest.mark.parametrize(
        ("phase", "forward", "backward", "words"),
        [
            ("backward", 10, 90, "smaller codes would save little"),
            ("backward", 90, 10, "smaller codes would help"),
            ("forward", 90, 0, "The peak is in the forward pass"),
        ],
    )
    def test_says_what_holds_the_peak(
        self, int4: Report, phase: str, forward: int, backward: int, words: str
    ) -> None:
        peak = Peak(
            plain_bytes=1000,
            bytes=100,
            phase=phase,
            forward_bytes=forward,
            backward_bytes=backward,
            module="Net/Block_7",
        )
        text = " ".join(str(dataclasses.replace(int4, peak=peak)).split())
        assert words in text and "Net/Block_7" in text

    def test_the_peak_is_taken_apart(self) -> None:
        task = MODELS["convnet_small"].task(batch=4)
        peak = jact.report(task.loss, has_aux=True, peak=True)(*task.abstract()).peak
        assert peak is not None and peak.phase == "backward"
        assert 0 < peak.forward_bytes < peak.bytes
        # Packing leaves gaps.
        assert 0.95 * peak.bytes < peak.forward_bytes + peak.backward_bytes <= peak.bytes
