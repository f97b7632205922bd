"""Reports: their figures by hand and against JAX's own, and what they look like."""

import contextlib
import dataclasses
import inspect
import io
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import pytest
import rich.console

import jact
from benchmarks.models import MODELS
from jact import Report
from jact.memory.report import Peak, Row
from jact.memory.sizes import format_bytes

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
X = jax.ShapeDtypeStruct((256, 64), jnp.float32)
SMALL = jax.ShapeDtypeStruct((8, 64), jnp.float32)
W_BYTES, X_BYTES = 64 * 64 * 4, 256 * 64 * 4
# 4 bits an element, and two bfloat16 numbers (least value and step) for each row.
INT4_BYTES = 256 * 64 // 2 + 256 * 4

# Those that take longest to trace and compile.
LARGE = ("bert_large", "swin_tiny", "vit_b16")


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def relu_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    hidden = x @ w
    return jnp.sum(jnp.where(hidden > 0, hidden, 0 * hidden) ** 2)


def two_lines(w: jax.Array, x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ w)  # the first
    return jnp.sum(jnp.tanh(x @ w))  # the second


def tanh_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def linear_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ w)


def layer_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(layer(w, x))


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def line_of(fun: Callable[..., Any], marker: str) -> str:
    lines, start = inspect.getsourcelines(fun)
    (offset,) = (i for i, line in enumerate(lines) if marker in line)
    return f"test_report.py:{start + offset} ({fun.__name__})"


def in_jax(fun: Callable[..., Any], *args: Any) -> list[str]:
    """The types of what `jax.ad_checkpoint.print_saved_residuals` lists, without arguments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(fun, *args)
    lines = printed.getvalue().splitlines()
    free = ("from the argument", "from a constant", "from a literal", "output of broadcast_in_dim")
    return sorted(line.split()[0] for line in lines if not any(words in line for words in free))


def types(report: Report) -> list[str]:
    dtypes = {"float32": "f32", "bool": "bool"}
    return sorted(f"{dtypes[r.dtype]}[{','.join(map(str, r.shape))}]" for r in report.rows)


def by_name(report: Report) -> dict[str, Row]:
    rows = {row.name: row for row in report.rows}
    assert len(rows) == len(report.rows)
    return rows


class TestFigures:
    def test_by_hand(self) -> None:
        report = jact.report(relu_loss, "int4")(W, X)
        rows = by_name(report)
        assert set(rows) == {"dot_general", "gt"}
        product, mask = rows["dot_general"], rows["gt"]
        assert (product.dtype, product.shape) == ("float32", (256, 64))
        assert (product.codec, product.exact, product.why) == (
            "int4",
            False,
            "an expensive operation",
        )
        assert (product.bytes, product.saved_bytes) == (X_BYTES, INT4_BYTES)
        assert (mask.dtype, mask.codec, mask.exact, mask.why) == ("bool", "mask", True, "a mask")
        # XLA stores a boolean in a byte; the mask codec in a bit.
        assert (mask.bytes, mask.saved_bytes) == (256 * 64, 256 * 64 // 8)
        assert report.saved_bytes == INT4_BYTES + 256 * 64 // 8
        # The product x @ w, or twice its positive part, and the mask; x itself is an argument.
        assert report.plain_bytes == X_BYTES + 256 * 64
        assert report.ratio == report.saved_bytes / report.plain_bytes
        assert (report.reference_arrays, report.reference_bytes) == (1, X_BYTES)

    def test_each_residual_counts_once(self) -> None:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            y = jnp.sin(x @ w)
            return jnp.sum((y @ w) * (y @ (w + 1)))

        # The cosine of x @ w, y, which two products read, the two products, and w + 1.
        report = jact.report(loss, "off")(W, X)
        assert report.plain_bytes == 4 * X_BYTES + W_BYTES

    def test_half_a_byte(self) -> None:
        @jax.custom_vjp
        def f(x: jax.Array) -> jax.Array:
            return jnp.sum(x)

        f.defvjp(lambda x: (f(x), x.astype(jnp.uint4)), lambda r, ct: (ct * r.astype(ct.dtype),))
        (row,) = jact.report(f, "off")(jax.ShapeDtypeStruct((3, 5), jnp.float32)).rows
        assert (row.dtype, row.bytes) == ("uint4", 8)

    @pytest.mark.parametrize("loss", [tanh_loss, relu_loss, two_lines])
    def test_off_lists_what_jax_lists(self, loss: Callable[..., Any]) -> None:
        report = jact.report(loss, "off")(W, X)
        assert types(report) == in_jax(loss, W, X)
        assert report.saved_bytes == report.plain_bytes > 0
        assert {(row.codec, row.exact) for row in report.rows} == {("keep", True)}
        assert all(row.bytes == row.saved_bytes for row in report.rows)
        assert report.ratio == 1

    @pytest.mark.parametrize(
        "model",
        [pytest.param(m, marks=[pytest.mark.slow] if m in LARGE else []) for m in MODELS],
    )
    def test_plain_bytes_do_not_depend_on_the_policy(self, model: str) -> None:
        task = MODELS[model].task(batch=16, layers=1)
        reports = {
            policy: jact.report(task.loss, policy, has_aux=True)(*task.abstract())
            for policy in ("off", "int4", "int2")
        }
        assert len({report.plain_bytes for report in reports.values()}) == 1
        assert reports["int2"].saved_bytes <= reports["int4"].saved_bytes
        assert reports["int4"].saved_bytes < reports["off"].saved_bytes
        names = [row.name for row in reports["off"].rows]
        assert len(set(names)) == len(names)

    def test_what_a_relu_selects_does_not_count(self) -> None:
        # JAX lists an array of zeros, which XLA never stores.
        report = jact.report(lambda w, x: jnp.sum(jax.nn.relu(x @ w)), "off")(W, X)
        assert [(row.dtype, row.shape) for row in report.rows] == [("bool", (256, 64))]

    def test_arguments_read_as_they_are_cost_nothing(self) -> None:
        for policy in ("off", "int4"):
            report = jact.report(linear_loss, policy)(W, X)
            assert report.rows == ()
            assert report.plain_bytes == report.saved_bytes == 0
            assert report.ratio == 1
            assert (report.reference_arrays, report.reference_bytes) == (1, X_BYTES)
            assert "Nothing is gained: the backward pass reads nothing but arguments." in str(
                report
            )

    def test_closed_over_arrays_cost_nothing(self) -> None:
        x = jnp.ones(X.shape)
        report = jact.report(lambda w: relu_loss(w, x))(W)
        other = jact.report(relu_loss)(W, X)
        assert (report.plain_bytes, report.saved_bytes) == (other.plain_bytes, other.saved_bytes)
        assert report.reference_bytes == X_BYTES

    def test_the_arguments_of_a_layer_count_unless_they_are_kept(self) -> None:
        report = jact.report(jact.compress(layer))(W, X)
        assert [(row.name, row.why) for row in report.rows] == [
            ("args[1]", "an input"),
            ("dot_general", "an expensive operation"),
        ]
        # x, and the cosine of x @ w.
        assert (report.plain_bytes, report.saved_bytes) == (2 * X_BYTES, 2 * INT4_BYTES)
        assert (report.reference_arrays, report.reference_bytes) == (1, W_BYTES)
        off = jact.report(jact.compress(layer, "off"))(W, X)
        assert off.rows[0].name == "args[1]"
        assert off.saved_bytes == off.plain_bytes == 2 * X_BYTES
        kept = jact.report(jact.compress(layer, keep=(0, 1)))(W, X)
        assert (kept.plain_bytes, kept.saved_bytes) == (X_BYTES, INT4_BYTES)

    def test_argnums_and_has_aux(self) -> None:
        def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return relu_loss(w, x), jnp.exp(x)

        by_weights = jact.report(loss, argnums=1, has_aux=True)(X, W)
        assert by_weights.reference_bytes == X_BYTES
        by_input = jact.report(loss, argnums=0, has_aux=True)(X, W)
        assert by_input.reference_bytes == W_BYTES
        assert by_weights.saved_bytes == by_input.saved_bytes == INT4_BYTES + 2048

    def test_arrays_keywords_and_static_arguments(self) -> None:
        def loss(w: jax.Array, *, x: jax.Array, kind: str) -> jax.Array:
            return relu_loss(w, x) if kind == "relu" else tanh_loss(w, x)

        expected = jact.report(relu_loss)(W, X)
        report = jact.report(loss)(jnp.ones(W.shape), x=jnp.ones(X.shape), kind="relu")
        assert report == dataclasses.replace(expected, function="loss")

    def test_keys_pass_through(self) -> None:
        def loss(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
            kept = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, x.shape)
            return jnp.sum(jnp.where(kept, jnp.tanh(x @ w), 0))

        off, int4 = (
            jact.report(loss, policy)(W, X, jax.eval_shape(lambda: jax.random.key(0)))
            for policy in ("off", "int4")
        )
        # JAX saves the dropout mask; jact draws it again from the key.
        assert [row.dtype for row in off.rows].count("bool") == 1
        assert [row.dtype for row in int4.rows] == ["float32"]


class TestRows:
    @pytest.mark.parametrize("policy", ["off", "int4"])
    def test_lines_are_the_users(self, policy: str) -> None:
        lines = [row.line for row in jact.report(two_lines, policy)(W, X).rows]
        expected = [line_of(two_lines, "the first"), line_of(two_lines, "the second")]
        assert list(dict.fromkeys(lines)) == expected

    @pytest.mark.parametrize("policy", ["off", "int4"])
    def test_lines_and_names_of_a_model(self, policy: str) -> None:
        task = MODELS["convnet_small"].task(batch=16, layers=1)
        rows = by_name(jact.report(task.loss, policy, has_aux=True)(*task.abstract()))
        lines = [row.line for name, row in rows.items() if name.startswith("ConvNet/Block_0/")]
        assert len(lines) > 2
        for line in lines:
            assert re.fullmatch(r"convnet\.py:\d+ \(Block\.__call__\)", line)

    def test_rows_say_why(self) -> None:
        rules = [
            jact.Rule("first", "keep"),
            jact.Rule("second", jact.codecs.resolve("fp8")),
            jact.Rule("third", "int8", max_size=10),
        ]

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            for name in ("first", "second", "third"):
                x = jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, name))
            return jnp.sum(x) + jnp.sum(jnp.tanh(x[:8] @ w))

        with pytest.warns(UserWarning, match="matches no residual"):
            report = jact.report(loss, jact.Policy(rules=rules))(W, X)
        why = {row.name: (row.codec, row.exact, row.why) for row in report.rows}
        assert why["first"] == ("keep", True, "the policy keeps it")
        assert why["second"] == ("fp8", False, "an expensive operation")
        assert why["third"] == ("int4", False, "an expensive operation")
        # Too few elements to be worth a code, like all that follows from them.
        assert ("keep", True, "follows from exact values") in why.values()
        assert report.policy == "int4 and 3 rules"
        assert "the policy keeps it" in str(report) and "an expensive operation" in str(report)

    def test_what_was_made_by_jact_brings_its_own_policy(self) -> None:
        for fun in (
            jact.grad(relu_loss, policy="int8"),
            jact.value_and_grad(relu_loss, policy="int8"),
            jax.jit(jact.grad(relu_loss, policy="int8")),
        ):
            report = jact.report(fun, "int2", argnums=1)(W, X)
            assert report.policy == "int8"
            assert report.function == "relu_loss"
            assert report.reference_bytes == X_BYTES
            assert by_name(report)["dot_general"].codec == "int8"

    def test_plans(self) -> None:
        plan = jact.make_plan(relu_loss, "int4")(W, X)
        report = jact.report(relu_loss, plan.replace({"dot_general": "int2"}))(W, X)
        assert report.policy == "a plan made from int4"
        codecs = {name: row.codec for name, row in by_name(report).items()}
        assert codecs == {"dot_general": "int2", "gt": "mask"}

    def test_wrong_use(self) -> None:
        with pytest.raises(ValueError, match="policy must be one of off, int8"):
            jact.report(relu_loss, "int9")
        with pytest.raises(TypeError, match="fun must be callable"):
            jact.report(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_rows must be None or at least 1, got 0"):
            jact.report(relu_loss, max_rows=0)


class TestPeak:
    def test_is_that_of_the_gradient(self) -> None:
        report = jact.report(tanh_loss, "int4", peak=True)(W, X)
        assert report.peak is not None
        gradients = jax.value_and_grad(tanh_loss), jact.value_and_grad(tanh_loss, policy="int4")
        plain, ours = (jact.memory.peak(gradient, W, X) for gradient in gradients)
        assert (report.peak.plain_bytes, report.peak.bytes) == (plain, ours)
        assert format_bytes(ours) in str(report)

    def test_not_lower_is_said_in_words(self) -> None:
        report = jact.report(linear_loss, peak=True)(W, X)
        assert report.peak is not None and report.peak.bytes >= report.peak.plain_bytes
        assert "The compiled peak of the gradient is not lower" in str(report)
        better = dataclasses.replace(report, peak=Peak(plain_bytes=2048, bytes=1024))
        assert "1.0 KiB with jact, 2.0 KiB without: 2.0 times less." in str(better)

    def test_auxiliary_data_and_other_arguments(self) -> None:
        def loss(w: jax.Array, x: jax.Array, n: jax.Array, kind: str) -> Any:
            return tanh_loss(w, x), {"n": n, "kind": kind, "x": jnp.exp(x)}

        count = jax.ShapeDtypeStruct((), jnp.int32)
        report = jact.report(loss, has_aux=True, peak=True)(W, X, count, "a")
        assert report.peak is not None and report.peak.plain_bytes > 0

    def test_of_a_layer_and_of_off(self) -> None:
        report = jact.report(jact.compress(layer, "off"), peak=True)(W, X)
        assert report.peak is not None
        assert report.peak.plain_bytes == report.peak.bytes > 0
        assert "Compiled peak of the gradient" in str(report)
        report = jact.report(jact.compress(layer), peak=True)(W, X)
        assert report.peak is not None and report.peak.bytes > 0

    def test_is_not_computed_unless_asked_for(self) -> None:
        report = jact.report(tanh_loss)(W, X)
        assert report.peak is None
        assert "peak" not in str(report)


def model_report(**options: Any) -> Report:
    task = MODELS["transformer_small"].task(batch=2, layers=3)
    return jact.report(task.loss, has_aux=True, **options)(*task.abstract())


class TestPrinted:
    @pytest.mark.parametrize("columns", [72, 80, 200])
    def test_names_and_types_are_never_cut(
        self, columns: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        report = model_report()
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= columns
        words = set(" ".join(lines).split())
        for row in report.rows:
            assert row.name in words
            assert f"f32[{','.join(map(str, row.shape))}]" in words
            assert row.line.split()[0] in words

    def test_the_middle_of_many_rows_is_left_out(self) -> None:
        report = model_report(max_rows=5)
        total = len(report.rows)
        text = str(report)
        assert f"... {total - 5} more rows" in text
        shown = [row.name for row in report.rows if re.search(rf"{row.name}(?![\w:])", text)]
        assert shown == [row.name for row in (*report.rows[:3], *report.rows[-2:])]
        assert "more row" not in str(dataclasses.replace(report, max_rows=None))
        assert "... 1 more row\n" in re.sub(r" +\n", "\n", str(self.with_rows(report, total - 1)))
        assert len(report.to_json()["rows"]) == total
        # The totals are those of all rows.
        assert format_bytes(report.saved_bytes) in text

    def with_rows(self, report: Report, max_rows: int) -> Report:
        return dataclasses.replace(report, max_rows=max_rows)

    def test_says_what_is_gained(self) -> None:
        text = str(jact.report(relu_loss)(W, X))
        assert "What relu_loss saves for its backward pass, policy int4" in text
        assert "jact saves 11.0 KiB, JAX 80.0 KiB: 7.3 times less." in text
        assert "Exact: 1 of 2 values, 2.0 KiB of what is saved." in text
        assert "also reads 1 argument (64.0 KiB), kept by reference at no cost" in text
        assert "JAX saves 80.0 KiB." in str(jact.report(relu_loss, "off")(W, X))

    def test_says_when_nothing_is_gained(self) -> None:
        text = str(jact.report(layer_loss)(W, SMALL))
        assert "Nothing is gained: jact saves 2.0 KiB, JAX 2.0 KiB." in text
        assert "No value is worth encoding" in text

    def test_rich_prints_it(self) -> None:
        report = jact.report(relu_loss)(W, X)
        console = rich.console.Console(file=io.StringIO(), width=120, record=True)
        console.print(report)
        printed = console.export_text()
        assert "f32[256,64]" in printed and "dot_general" in printed

    def test_html(self) -> None:
        report = jact.report(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(W, X)
        html = report._repr_html_()
        assert "&lt;lambda&gt;" in html and "<lambda>" not in html
        assert "f32[256,64]" in html and "dot_general" in html
        assert html.count("<table>") == html.count("</table>") == 2
        layer_report = jact.report(jact.compress(lambda x: jnp.tanh(x["<b>&"]), keep=()))
        html = layer_report({"<b>&": X})._repr_html_()
        assert "<b>&" not in html
        assert "&lt;b&gt;&amp;" in html
        long = model_report(max_rows=5)
        assert f"... {len(long.rows) - 5} more rows" in long._repr_html_()

    def test_json(self) -> None:
        report = jact.report(relu_loss, peak=True)(W, X)
        data = json.loads(json.dumps(report.to_json()))
        assert data["saved_bytes"] == report.saved_bytes
        assert data["plain_bytes"] == report.plain_bytes
        assert data["ratio"] == report.ratio
        assert data["policy"] == "int4" and data["function"] == "relu_loss"
        assert data["peak"] == dataclasses.asdict(report.peak)  # type: ignore[arg-type]
        (row,) = (row for row in data["rows"] if row["name"] == "dot_general")
        assert row == {
            "name": "dot_general",
            "kind": "code",
            "line": line_of(relu_loss, "x @ w"),
            "shape": [256, 64],
            "dtype": "float32",
            "bytes": X_BYTES,
            "codec": "int4",
            "saved_bytes": INT4_BYTES,
            "exact": False,
            "why": "an expensive operation",
            "offloaded": False,
        }
        assert jact.report(linear_loss)(W, X).to_json()["peak"] is None

    def test_reports_are_values(self) -> None:
        first, second = (jact.report(relu_loss)(W, X) for _ in range(2))
        assert first == second and hash(first) == hash(second)
        with pytest.raises(dataclasses.FrozenInstanceError):
            first.plain_bytes = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB"), (2**40, "1.0 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
