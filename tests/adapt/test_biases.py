"""Biases are measured now and then, and taken for what they were in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact
from jact.adapt.biases import Biases
from jact.adapt.steps import Steps
from tests.adapt.steps import batch, controller, params

FULL = [True, True, False, False, False, True]


def curved(params, x):
    """Biases are most of the error here: the noise averages out over the many rows."""
    return jnp.mean((jax.nn.gelu(x @ params[0]) @ params[1]) ** 2)


def curved_controller():
    policy = jact.Policy(derivatives=False)
    return controller(bits=3, codecs=("int8", "int2"), every=2, switch_after=1, policy=policy)


def curved_step(c, **options):
    return c.jit(lambda params, x: jact.grad(curved, policy=c)(params, x), **options)


@pytest.fixture
def probes(monkeypatch):
    """What each probe was told, and what it found."""
    told, probe = [], Steps.probe

    def noting(self, mode, arguments, full, args, kwargs):
        figures, mode = probe(self, mode, arguments, full, args, kwargs)
        told.append((full, jax.device_get(figures)))
        return figures, mode

    monkeypatch.setattr(Steps, "probe", noting)
    return told


def test_errors_are_the_same_whether_biases_are_measured_or_known(probes):
    c = curved_controller()
    step = curved_step(c)
    for i in range(10):
        step(params((1, 1)), batch(i, rows=1 << 14))
    c.state  # noqa: B018  Waits for what is decided in the background.
    assert [full for full, _ in probes] == FULL
    for full, figures in probes:
        (found,) = figures.values()
        assert (found["bias"].sum() > 0) == full
        assert found["independent"].sum() < 0.5 * found["error"].sum() or not full
    errors = [a.predicted_error for a in c.history]
    np.testing.assert_allclose(errors, errors[1], rtol=0.1)


def test_what_is_asked_for_is_measured(probes):
    c = curved_controller()
    step = curved_step(c)
    for i in range(4):
        if i == 3:
            c.adapt()
        step(params((1, 1)), batch(i, rows=1 << 10))
    assert [full for full, _ in probes] == [True, True, False, True]


def test_another_batch_size_is_measured_anew(probes):
    c = curved_controller()
    step = curved_step(c)
    for i in range(5):
        step(params((1, 1)), batch(i, rows=1 << 10 if i < 4 else 1 << 11))
    assert [full for full, _ in probes] == [True, True, False, True]


def test_a_resumed_run_knows_them(probes):
    c = curved_controller()
    step = curved_step(c)
    for i in range(3):
        step(params((1, 1)), batch(i, rows=1 << 10))
    resumed = curved_controller()
    resumed.restore(c.state)
    step = curved_step(resumed)
    for i in range(3, 10):
        step(params((1, 1)), batch(i, rows=1 << 10))
    assert [full for full, _ in probes] == FULL


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"in_shardings": None}, False),
        ({"in_shardings": (None, None), "static_argnums": 2}, True),
    ],
)
def test_with_the_options_of_jit(probes, options, told):
    c = curved_controller()

    @c.jit(**options)
    def step(params, x, scale=1.0):
        return jax.tree.map(lambda g: g * scale, jact.grad(curved, policy=c)(params, x))

    scale = (2.0,) if told else ()
    args = params((1, 1)), batch(0, rows=1 << 10)
    for i in range(4):
        # After the first steps, which are traced with what NumPy holds.
        with jax.transfer_guard("disallow" if i > 1 else "allow"):
            step(*args, *scale)
    measured = [bool(next(iter(found.values()))["bias"].sum() > 0) for _, found in probes]
    assert measured == [True, True, told]


def test_where_the_function_is_another_one_errors_are_independent():
    ones = np.ones((2, 3))
    known = Biases("", {"f": (3 * ones).tolist()}, {"f": ones.tolist()})
    found = {"independent": 2 * ones, "count": np.ones(())}
    complete = known.complete({"f": found, "g": found, "h": found | {"independent": ones[:1]}})
    np.testing.assert_array_equal(complete["f"]["error"], 6 * ones)
    np.testing.assert_array_equal(complete["f"]["bias"], 2 * ones)
    for name in ("g", "h"):
        np.testing.assert_array_equal(complete[name]["error"], complete[name]["independent"])
        assert not complete[name]["bias"].any()
