"""The controller, one behaviour after the other."""

import copy
import logging
import pickle
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact
import jact.memory
from jact.adapt.steps import Program
from tests.adapt.steps import Drifting, batch, branches, controller, loss, params, sgd, train


@pytest.mark.oldest
def test_adapts_first_periodically_and_when_asked():
    c = controller(every=10)
    step = sgd(c)
    assert c.plan is None
    values = train(step, params(), 0, 13)
    c.adapt()
    train(step, values, 13, 32)
    assert [(a.step, a.reason) for a in c.history] == [
        (0, "first"),
        (1, "confirm"),
        (10, "periodic"),
        # Asked for before step 13, while the periodic one was being settled.
        (15, "asked"),
        (20, "periodic"),
    ]
    assert c.step == 32


def test_the_plan_is_within_the_budget_and_mixes_codecs():
    c = controller(bits=3)
    train(sgd(c), params(), 0, 1)
    assert c.history[0].bits <= 3
    assert len(set(c.plan.bits.values())) > 1
    uniform = jact.report(loss, "int4")(params(), batch(0)).saved_bytes
    assert c.history[0].nbytes < uniform


def test_four_bits_cost_no_more_than_the_preset():
    c = controller(bits=4)
    train(sgd(c), params(), 0, 1)
    exact = jact.make_plan(loss, "int4")(params(), batch(0))
    assert set(c.plan.codecs) == set(exact.codecs)
    uniform = jact.report(loss, "int4")(params(), batch(0))
    assert c.history[0].nbytes <= sum(r.saved_bytes for r in uniform.rows if r.codec == "int4")


def test_gradients_are_those_of_the_plan():
    c = controller()
    new, value = sgd(c)(params(), batch(0))

    @jax.jit
    def expected(params, x):
        value, grads = jact.value_and_grad(loss, policy=c.plan)(params, x)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    for a, b in zip(
        jax.tree.leaves(expected(params(), batch(0))), jax.tree.leaves((new, value)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_probe_leaves_donated_arguments_alone():
    c = controller(every=4, switch_after=1)
    step = sgd(c, donate_argnums=0)
    first = params()
    values = train(step, first, 0, 9)
    assert first[0].is_deleted() and not values[0].is_deleted()
    assert np.isfinite(values[0]).all()
    fixed = controller(every=10**6)
    plain = train(sgd(fixed), params(), 0, 9)
    np.testing.assert_allclose(values[0], plain[0], atol=1e-2)


def test_options_of_jit():
    c = controller()

    @c.jit(static_argnums=2, static_argnames="scale")
    def step(params, x, sign, *, scale=1.0):
        assert isinstance(sign, str) and isinstance(scale, float)
        grads = jact.grad(loss, policy=c)(params, x)
        factor = -scale if sign == "down" else scale
        return jax.tree.map(lambda p, g: p + factor * g, params, grads)

    down = step(params(), batch(0), "down", scale=0.5)
    up = step(params(), batch(0), "up", scale=0.5)
    for p, d, u in zip(params(), down, up, strict=True):
        np.testing.assert_allclose((d + u) / 2, p, atol=1e-6)


def test_same_seed_same_plans():
    histories = []
    for _ in range(2):
        c = controller(every=4)
        values = train(sgd(c), params(), 0, 14)
        histories.append([a.to_json() for a in c.history])
    assert len(histories[0]) >= 4
    assert histories[0] == histories[1]
    assert np.isfinite(values[0]).all()


def test_switches_only_where_the_gain_is_clear():
    c = controller(every=4, min_gain=0.999)
    train(sgd(c), params(), 0, 20)
    assert [a.switched for a in c.history] == [True] + [False] * (len(c.history) - 1)
    assert len(c.history) > 3
    assert c.compilations == 1
    for a in c.history[1:]:
        assert a.predicted_error == a.replaced_error


def test_compilations_are_the_distinct_plans_and_bounded():
    d = Drifting(every=4, switch_after=2, max_compiled=2)
    # To a step at which no plan is being compiled.
    d.run(0, 52)
    c = d.controller
    chosen = [a.plan for a in c.history if a.switched]
    assert len(set(chosen)) >= 3
    assert len(c._schedule.steps) <= 2
    # A plan that was dropped is compiled again.
    assert len(set(chosen)) <= c.compilations <= len(chosen)
    kept = Drifting(every=4, switch_after=2, max_compiled=10)
    kept.run(0, 52)
    c = kept.controller
    assert (
        c.compilations == len({a.plan for a in c.history if a.switched}) == len(c._schedule.steps)
    )


def test_compiles_in_the_background_while_steps_go_on(monkeypatch):
    threads, steps_meanwhile = [], []
    compiling, here = threading.Event(), threading.current_thread()
    compile_it = Program.compile

    def slow(self, arguments):
        threads.append(threading.current_thread())
        before = d.controller.step
        compiling.set()
        result = compile_it(self, arguments)
        if len(threads) > 1:
            deadline = time.monotonic() + 60
            while d.controller.step < before + 3 and time.monotonic() < deadline:
                time.sleep(0.01)
        steps_meanwhile.append(d.controller.step - before)
        compiling.clear()
        return result

    monkeypatch.setattr(Program, "compile", slow)
    d = Drifting(every=12, switch_after=8)
    for i in range(40):
        d.run(i, i + 1)
        pending = d.controller._at.pending
        # Steps are so short that all of them could pass before the job comes to its compilation.
        while pending and not (compiling.is_set() or pending.future.done()):
            time.sleep(0.01)
    assert threads[0] is here
    assert len(threads) > 1 and here not in threads[1:]
    # The job waited for three steps to be run while it was compiling, and they were.
    assert all(n >= 3 for n in steps_meanwhile[1:])


def test_the_switch_comes_at_its_step_and_compiles_nothing(caplog):
    d = Drifting(every=12, switch_after=8)
    c = d.controller
    plans, compiled = [], []
    jax.config.update("jax_log_compiles", True)
    try:
        for i in range(40):
            if c._at.pending is not None:
                c._at.pending.future.result()
            caplog.clear()
            d.run(i, i + 1)
            plans.append(c.plan)
            messages = [r.message for r in caplog.records if "Compiling jit(step)" in r.message]
            compiled.append(len(messages))
    finally:
        jax.config.update("jax_log_compiles", False)
    changes = [i for i in range(1, 40) if plans[i] != plans[i - 1]]
    switched = [a.step + 8 for a in c.history[1:] if a.switched]
    assert changes == [s for s in switched if s < 40] and changes
    assert sum(compiled[2:]) == 0


def test_a_probe_of_nan_keeps_the_plan_and_says_so_once_each(caplog):
    c = controller(every=4, switch_after=1)
    step = sgd(c)
    values = train(step, params(), 0, 4)
    plan = c.plan
    with caplog.at_level(logging.WARNING, "jact.adapt"):
        step(values, batch(4).at[0, 0].set(jnp.nan))
        step(values, batch(5).at[0, 0].set(jnp.inf))
        train(step, values, 6, 8)
    messages = [r.message for r in caplog.records if "infinite values or NaN" in r.message]
    assert len(messages) == 2 and all("the plan stays" in message for message in messages)
    assert c.plan == plan
    train(step, values, 8, 14)
    assert "retry" in [a.reason for a in c.history]
    assert all(np.isfinite(a.predicted_error) for a in c.history)


def test_nan_at_the_first_step_gives_a_guess_and_then_a_plan(caplog):
    c = controller()
    step = sgd(c)
    with caplog.at_level(logging.WARNING, "jact.adapt"):
        values, _ = step(params(), batch(0).at[0, 0].set(jnp.nan))
    assert "the first plan is a guess" in caplog.text
    assert "guess" in c.history[0].note and c.history[0].bits <= 5
    train(step, params(), 1, 8)
    assert c.history[1].reason == "retry" and np.isfinite(c.history[1].predicted_error)


def test_a_failing_compilation_keeps_the_plan(monkeypatch, caplog):
    d = Drifting(every=6, switch_after=3)
    d.run(0, 5)
    plan = d.controller.plan

    def fail(self, arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Program, "compile", fail)
    d.run(5, 40)
    assert d.controller.plan == plan
    assert "out of memory" in caplog.text


def test_metrics_and_report():
    c = controller(every=6)
    step = sgd(c)
    assert c.metrics["jact/step"] == 0
    train(step, params(), 0, 7)
    metrics = c.metrics
    assert all(type(v) is float for v in metrics.values())
    assert metrics["jact/step"] == 7 and metrics["jact/compilations"] >= 1
    assert 0 < metrics["jact/bits"] <= 5
    report = c.report()
    assert "5 bits on average" in report and "first" in report
    for name in c.plan.codecs:
        assert name in report


def test_measures_the_error_that_it_predicts():
    c = controller(bits=3)
    step = sgd(c)
    with pytest.raises(ValueError, match="no plan yet"):
        c.measure(params(), batch(0))
    step(params(), batch(0))
    measured = c.measure(params(), batch(0))
    coded = jax.jit(jact.grad(loss, policy=c.plan))(params(), batch(0))
    exact = jax.jit(jax.grad(loss))(params(), batch(0))
    difference = sum(jnp.sum((a - b) ** 2) for a, b in zip(coded, exact, strict=True))
    expected = jnp.sqrt(difference / sum(jnp.sum(g**2) for g in exact))
    assert measured == pytest.approx(float(expected), rel=0.3)
    assert measured == pytest.approx(c.history[0].predicted_error, rel=0.5)
    assert c.history[0].measured_error == c.metrics["jact/measured_error"] == measured


def test_counts_the_bias_of_nonlinear_functions():
    """Noise averages out over many rows, and what it does to the mean of a GELU does not."""

    def loss(params, x):
        return jnp.mean((jax.nn.gelu(x @ params[0]) @ params[1]) ** 2)

    c = controller(bits=3, policy=jact.Policy(derivatives=False))

    @c.jit
    def step(params, x):
        return jact.grad(loss, policy=c)(params, x)

    x = batch(0, rows=1 << 14)
    step(params((1, 1)), x)
    # Without the bias that is 0.4 times what is measured.
    assert c.history[0].predicted_error == pytest.approx(c.measure(params((1, 1)), x), rel=0.25)


@pytest.mark.slow
def test_warns_where_compression_adds_more_than_a_tenth_of_the_variance(caplog):
    def noisy(bits, spread=0.03):
        caplog.clear()
        c = controller(bits=bits, codecs=("int8", "int1"))
        step = sgd(c)
        # All batches alike but for a little: the gradient hardly varies.
        for i in range(6):
            step(params(), batch(0) + spread * batch(i + 1))
        return c.history[-1].noise

    with caplog.at_level(logging.WARNING, "jact.adapt"):
        assert noisy(1) > 0.1
        assert "slow training down" in caplog.text
        assert noisy(8) < 0.1
        assert "slow training down" not in caplog.text
        # Where all of the data are one batch, hardly any error at all is still above its variance.
        assert noisy(8, spread=1e-6) > 0.1
        assert "slow training down" not in caplog.text


def test_inner_functions_are_traced_for_each_plan():
    """JAX would take what it has traced of `inner` under the first plan for every other one."""
    d = Drifting(every=6, switch_after=1)
    c = d.controller
    c._schedule.steps = None
    inner = jax.jit(lambda *args: jact.grad(branches, policy=c)(*args))
    step = c.jit(lambda *args: inner(*args))
    plans = set()
    for i in range(30):
        grads = step(*d.arguments(i))
        if c.plan not in plans:
            plans.add(c.plan)
            expected = jax.jit(jact.grad(branches, policy=c.plan))(*d.arguments(i))
            np.testing.assert_array_equal(grads[0], expected[0])
    assert len(plans) >= 2


def test_outside_of_its_step_a_function_follows_the_present_plan():
    c = controller()
    step = sgd(c)
    before = jax.jit(jact.grad(loss, policy=c))(params(), batch(0))
    expected = jax.jit(jact.grad(loss, policy="int4"))(params(), batch(0))
    np.testing.assert_array_equal(before[0], expected[0])
    step(params(), batch(0))
    after = jax.jit(lambda *a: jact.grad(loss, policy=c)(*a))(params(), batch(0))
    expected = jax.jit(jact.grad(loss, policy=c.plan))(params(), batch(0))
    np.testing.assert_array_equal(after[0], expected[0])
    assert jact.make_plan(loss, c)(params(), batch(0)) == c.plan


def test_another_batch_size_is_compiled_as_jit_would():
    c = controller()
    step = sgd(c)
    values = train(step, params(), 0, 2)
    smaller, _ = step(values, batch(2, rows=128))
    assert np.isfinite(smaller[0]).all()


def test_wrong_uses():
    with pytest.raises(ValueError, match="one of bits, fraction and memory, not bits and memory"):
        jact.Controller(bits=4, memory="1 GiB")
    with pytest.raises(ValueError, match="bits must be at least 1, got 0.5"):
        jact.Controller(bits=0.5)
    with pytest.raises(ValueError, match="fraction must be above 0 and at most 1, got 2"):
        jact.Controller(fraction=2)
    with pytest.raises(ValueError, match="memory must be a number with a unit.*got '2 apples'"):
        jact.Controller(memory="2 apples")
    with pytest.raises(ValueError, match="every must be at least 2, got 0"):
        jact.Controller(every=0)
    with pytest.raises(ValueError, match="switch_after must be at most every=10, got 11"):
        jact.Controller(every=10, switch_after=11)
    with pytest.raises(ValueError, match='"local" or "exact", got \'quick\''):
        jact.Controller(sensitivity="quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of .*got 'int9'"):
        jact.Controller(codecs=("int9",))
    with pytest.raises(ValueError, match="policy must choose residuals, got 'off'"):
        jact.Controller(policy="off")
    c = controller()
    sgd(c)
    with pytest.raises(ValueError, match="already follows .*step"):
        c.jit(lambda x: x)
    unused = jact.Controller()
    with pytest.raises(ValueError, match="nothing whose policy is this controller"):
        unused.jit(lambda x: jnp.sin(x))(1.0)
    impossible = controller(bits=1, codecs=("int8",))
    with pytest.raises(ValueError, match="smallest of their candidates"):
        sgd(impossible)(params(), batch(0))


def test_lower_serves_memory_analyses():
    c = controller()
    step = sgd(c)
    with pytest.raises(ValueError, match="no plan yet"):
        step.lower(params(), batch(0))
    step(params(), batch(0))
    stats = step.lower(params(), batch(0)).compile().memory_analysis()
    assert stats.temp_size_in_bytes == c.history[0].peak


def in_a_loop(params, x):
    y, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack(params))
    return jnp.mean((y - x) ** 2)


class TestBatchSizes:
    """Other batches than the one that was measured, and much smaller ones."""

    @staticmethod
    def run(c, sizes, fun=loss):
        """The gradients of each step, and those of `jax.grad`."""
        got, expected = [], []
        step = c.jit(lambda params, x: jact.grad(fun, policy=c)(params, x))
        for i, rows in enumerate(sizes):
            got.append(step(params(), batch(i, rows)))
            expected.append(jax.jit(jax.grad(fun))(params(), batch(i, rows)))
        return got, expected

    @pytest.mark.parametrize(
        ("sizes", "fun"),
        [([256, 100, 1] * 4, in_a_loop), ([1, 100, 256] * 4, loss), ([256] * 5 + [20], loss)],
    )
    def test_alternate(self, sizes, fun, caplog):
        c = controller(bits=6, codecs=("int8", "int6", "int4"), every=5, switch_after=1)
        for got, expected in zip(*self.run(c, sizes, fun), strict=True):
            for a, b in zip(got, expected, strict=True):
                assert jnp.linalg.norm(a - b) < 0.4 * jnp.linalg.norm(b)
        assert "failed" not in caplog.text
        assert len(c.plan.entries) >= 2 and all(np.isfinite(a.predicted_error) for a in c.history)

    def test_small_ones_are_not_measured(self):
        c = controller(every=4, switch_after=1)
        self.run(c, [256, 8, 8, 256, 8, 8, 8, 256, 256, 8])
        # Every fourth step is due, and waits for a large one.
        assert [(a.step, a.reason) for a in c.history] == [
            (0, "first"),
            (3, "confirm"),
            (7, "periodic"),
            (8, "periodic"),
        ]
        assert len({a.plan.operations for a in c.history}) == 1

    def test_but_are_where_there_are_no_others(self):
        c = controller(every=4, switch_after=1)
        self.run(c, [256, 256] + [64] * 14)
        steps = [a.step for a in c.history]
        # Due from step 4, waited for until step 8.
        assert steps[:3] == [0, 1, 8] and len(steps) > 3

    def test_a_plan_keeps_what_it_says_of_larger_ones(self):
        c = controller(bits=8, codecs=("int8", "int4"), every=4, switch_after=1)
        self.run(c, [256, 256] + [8] * 12)
        assert c.history[-1].step > 8
        assert set(c.plan.bits) == set(c.history[0].plan.bits)

    def test_a_larger_one_is_measured_anew(self):
        c = controller(every=100, switch_after=1)
        self.run(c, [8, 256, 256, 256])
        assert [(a.step, a.reason) for a in c.history] == [(0, "first"), (2, "confirm")]
        assert not c.history[0].plan.bits and c.plan.bits.keys() == c.history[1].plan.bits.keys()
        assert set(c.plan.bits) == set(jact.make_plan(loss)(params(), batch(0)).bits)

    def test_a_resumed_run_waits_for_the_same(self):
        c = controller(every=4, switch_after=1)
        sizes = [256, 256, 256, 256, 8, 8]
        self.run(c, sizes)
        other = controller(every=4, switch_after=1)
        other.restore(c.state)
        assert other._at == c._at and other._at.waited == 2


def gradient(c: jact.Controller):
    return jact.value_and_grad(loss, policy=c)


@pytest.mark.parametrize("nested", [False, True])
def test_warns_where_plain_jit_compiles_the_step(nested):
    c = controller()
    step = jax.jit(jax.vmap(gradient(c), (None, 0)) if nested else gradient(c))
    x = batch(0)[None] if nested else batch(0)
    with pytest.warns(UserWarning, match="write @controller.jit in the place of @jax.jit") as found:
        step(params(), x)
    assert found[0].filename == __file__


def test_warns_of_a_compressed_part_under_plain_jit():
    part = jact.compress(loss, controller())
    with pytest.warns(UserWarning, match="write @controller.jit"):
        jax.jit(jax.grad(part))(params(), batch(0))


@pytest.mark.parametrize(
    "use",
    [
        lambda c: gradient(c)(params(), batch(0)),
        lambda c: jax.vmap(gradient(c), (None, 0))(params(), batch(0)[None]),
        lambda c: jax.grad(jact.compress(loss, c))(params(), batch(0)),
        lambda c: jax.jit(jact.compress(loss, c))(params(), batch(0)),
        lambda c: jact.report(loss, c)(params(), batch(0)),
        lambda c: jact.make_plan(gradient(c))(params(), batch(0)),
        lambda c: jact.memory.peak(gradient(c), params(), batch(0)),
        lambda c: c.jit(lambda p, x: jax.jit(gradient(c))(p, x))(params(), batch(0)),
        lambda c: (sgd(c), jax.jit(gradient(c))(params(), batch(0))),
    ],
    ids=["eager", "vmap", "compress", "evaluation", "report", "plan", "peak", "nested", "beside"],
)
def test_does_not_warn_elsewhere(use):
    """Warnings are errors here."""
    use(controller())


def test_pickling_says_how_to_save():
    c = controller()
    with pytest.raises(TypeError, match=r"use controller\.save\(path\)"):
        pickle.dumps(c)
    assert copy.copy(c).plan is copy.deepcopy(c).plan is None
