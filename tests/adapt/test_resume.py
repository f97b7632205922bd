"""A resumed run goes on as an uninterrupted one."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.adapt.steps import Drifting, batch, controller, params, sgd, train

#: Before the second batch of a probe, while a plan is being decided on, and after that.
STOPS = (7, 9, 12)


@pytest.fixture(scope="module")
def uninterrupted():
    d = Drifting(every=6, switch_after=4)
    states = {}
    for i in range(24):
        if i in STOPS:
            states[i] = d.controller.state
        d.run(i, i + 1)
    return d.controller, states


@pytest.mark.parametrize("stop", STOPS)
def test_history_and_plans_are_those_of_an_uninterrupted_run(uninterrupted, stop, tmp_path):
    whole, states = uninterrupted
    saved = Drifting(every=6, switch_after=4)
    saved.controller.restore(states[stop])
    saved.controller.save(tmp_path / "controller.json")
    resumed = Drifting(every=6, switch_after=4)
    resumed.controller.load(tmp_path / "controller.json")
    assert resumed.controller.step == stop
    resumed.run(stop, 24)
    assert resumed.controller.plan == whole.plan
    assert len(whole.history) >= 4
    for a, b in zip(resumed.controller.history, whole.history, strict=True):
        # A peak is known where the plan was compiled by the same process.
        ours, theirs = (x.to_json() | {"peak": None} for x in (a, b))
        assert ours == theirs
    a, b = (c._at.to_json() | {"history": [], "model": None} for c in (resumed.controller, whole))
    assert a == b


def test_the_state_is_a_pytree_that_orbax_saves(tmp_path):
    c = controller()
    train(sgd(c), params(), 0, 3)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", c.state)
        restored = checkpointer.restore(tmp_path / "state")
    other = controller()
    other.restore(restored)
    assert other.plan == c.plan and other.step == 3
    assert [a.to_json() for a in other.history] == [a.to_json() for a in c.history]
    new, _ = sgd(other)(params(), batch(3))
    assert np.isfinite(new[0]).all()


def test_states_of_something_else_are_refused(tmp_path):
    c = controller(bits=3)
    with pytest.raises(ValueError, match="controller with 3 bits on average, not 4 bits"):
        controller(bits=4).restore(c.state)
    with pytest.raises(ValueError, match="must be that of a controller"):
        c.restore({"step": 3})
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match="must be that of a controller"):
        c.load(tmp_path / "other")
