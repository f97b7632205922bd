"""Pictures: what they show, that labels keep apart, and that they can be read in grey."""

import builtins
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.colors
import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

import jact
import jact.memory
from benchmarks.models import MODELS
from jact.memory import plots
from jact.memory.report_groups import by_layer, largest_first

W, X = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(64, 64), (4096, 64)])


@pytest.fixture(autouse=True)
def _close() -> Any:
    yield
    plt.close("all")


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


@pytest.fixture(scope="module")
def found() -> jact.Report:
    task = MODELS["convnet_small"].task(batch=16, layers=3)
    return jact.report(task.loss, has_aux=True)(*task.abstract())


def boxes(axes: Any) -> list[Any]:
    axes.figure.draw_without_rendering()
    renderer = axes.figure.canvas.get_renderer()
    texts = [*axes.texts, *axes.get_yticklabels(), *axes.get_xticklabels(), axes.title]
    return [t.get_window_extent(renderer) for t in texts if t.get_text() and t.get_visible()]


@pytest.mark.parametrize("kind", ["both", "treemap", "bars"])
def test_labels_keep_apart(found: jact.Report, kind: str) -> None:
    figure = found.plot(kind)
    assert len(figure.axes) == (2 if kind == "both" else 1)
    for axes in figure.axes:
        for a, b in itertools.combinations(boxes(axes), 2):
            assert not a.overlaps(b)


def test_treemap_shows_what_is_saved(found: jact.Report) -> None:
    (axes,) = found.plot("treemap").axes
    areas = [p.get_width() * p.get_height() for p in axes.patches if isinstance(p, Rectangle)]
    assert sum(areas) == pytest.approx(1.6)
    largest = largest_first(by_layer(found.rows, 24))[0]
    assert max(areas) / 1.6 == pytest.approx(largest.saved_bytes / found.saved_bytes)
    words = " ".join(text.get_text() for text in axes.texts)
    assert all(f"Block_{i}" in words for i in range(3))
    # A label lies within its rectangle.
    axes.figure.draw_without_rendering()
    for text in axes.texts:
        extent = text.get_window_extent()
        around = [p.get_window_extent() for p in axes.patches]
        assert any(box.x0 <= extent.x0 and extent.x1 <= box.x1 for box in around)


def test_bars_show_every_layer(found: jact.Report) -> None:
    (axes,) = found.plot("bars").axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[0] == "Conv_0"
    assert [n for n in names if n.endswith("/Conv_0")] == [f"Block_{i}/Conv_0" for i in range(3)]
    total = sum(p.get_width() for p in axes.patches if p.get_facecolor() != (1.0, 1.0, 1.0, 1.0))
    assert total == pytest.approx(found.saved_bytes / 2**20, rel=0.02)


def test_timelines_over_each_other() -> None:
    courses = [
        jact.memory.timeline(jact.grad(loss, policy=policy), W, X, label=policy)
        for policy in ("off", "int4")
    ]
    axes = courses[0].plot(courses[1])
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    for line, course in zip(lines, courses, strict=True):
        assert max(line.get_ydata()) == pytest.approx(course.peak_bytes / 2**20)
        assert min(line.get_xdata()) >= 0 and max(line.get_xdata()) == 2
    assert len({line.get_linestyle() for line in lines}) == 2
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.partition(":")[0] for label in labels] == ["off", "int4"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["forward", "backward"]
    own = plt.figure().subplots()
    forward = jact.memory.timeline(loss, W, X)
    assert forward.plot(axes=own) is own
    assert own.get_xlabel() == "share of the schedule"


@pytest.mark.parametrize("colours", [plots._COLOURS[:3], list(plots._KINDS.values())[:3]])
def test_colours_differ_in_grey(colours: Any) -> None:
    greys = []
    for colour in colours:
        red, green, blue = matplotlib.colors.to_rgb(colour)
        greys.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    for a, b in itertools.combinations(greys, 2):
        assert abs(a - b) > 0.09


def test_squarify_fills_the_whole_without_overlap() -> None:
    sizes = [50, 20, 9, 9, 5, 4, 2, 1]
    rectangles = plots.squarify(sizes, 3.0, 2.0)
    for (_, _, width, height), size in zip(rectangles, sizes, strict=True):
        assert width * height == pytest.approx(6.0 * size / sum(sizes))
        assert max(width / height, height / width) < 4
    for (x, y, w, h), (a, b, c, d) in itertools.combinations(rectangles, 2):
        overlap = min(x + w, a + c) - max(x, a), min(y + h, b + d) - max(y, b)
        assert min(overlap) < 1e-9
    assert plots.squarify([], 1.0, 1.0) == []


def test_nothing_saved_and_wrong_use(found: jact.Report) -> None:
    jact.report(lambda w, x: jnp.sum(x @ w))(W, X).plot()
    with pytest.raises(ValueError, match='kind must be "treemap", "bars" or "both"; got \'pie\''):
        found.plot("pie")


def test_says_what_to_install(found: jact.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        found.plot()
