"""What the tests of both doors share: inputs, and comparisons with the plain model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core as jex

from jact import compat
from jact.engine import marks
from tests.transform.cases import assert_close

ROWS, WIDTH, HIDDEN = 256, 64, 128
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
#: The relative error of a gradient that is allowed at 8 bits.
TOLERANCE = 0.02


def parametrize_forms(forms: Iterable[str], in_evaluation: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every form in training; in evaluation some stand for all, and the others are slow tests."""
    slow = [pytest.param(f, False, marks=pytest.mark.slow) for f in forms if f not in in_evaluation]
    training = [(form, True) for form in forms]
    evaluation = [(form, False) for form in in_evaluation]
    return pytest.mark.parametrize(("form", "train"), [*training, *evaluation, *slow])


def assert_equal(got: Any, want: Any) -> None:
    """Compares two pytrees bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert bool((a == b).all()), (a, b)


def assert_same_step(got: Any, want: Any) -> None:
    """Compares `((value, state), gradient)` with the plain model's; only gradients may differ."""
    assert_equal(got[0], want[0])
    assert jax.tree.structure(got[1]) == jax.tree.structure(want[1])
    assert_close(got[1], want[1], TOLERANCE)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, nested ones too."""
    for eqn in compat.equations(jaxpr):
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def codes(fun: Callable[..., Any], *args: Any) -> list[marks.Mark]:
    """What a gradient saves encoded, one entry for each residual."""
    found = [marks.read(eqn) or () for eqn in equations(jax.make_jaxpr(fun)(*args))]
    return [mark for group in found for mark in group if mark.part == 0 and not mark.exact]
