"""Groups: which elements share a range."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jact_kernels import Groups, plan_groups

SHAPES = (
    st.lists(st.integers(0, 70), max_size=5)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) <= 20000)
)


@pytest.mark.parametrize(
    ("shape", "split", "axes"),
    [
        ((128, 32, 32, 64), (128, 16, 2, 32, 64), (2, 3)),
        ((64, 7, 7, 2048), (64, 1, 7, 7, 2048), (2, 3)),
        ((16, 512, 768), (16, 8, 64, 768), (2,)),
        ((2, 12, 512, 64), (2, 12, 8, 64, 64), (3,)),
        ((8, 1024), (8, 16, 64), (2,)),
        ((640,), (10, 64), (1,)),
        # A prime axis is taken whole where it is not too long, and where nothing else is left.
        ((4, 509, 3), (4, 1, 509, 3), (2,)),
        ((10007,), (1, 10007), (1,)),
        # A prime outer axis is left out where the inner one is a fair group by itself.
        ((4, 31, 32, 8), (4, 31, 1, 32, 8), (3,)),
        # Axes of one entry do no harm.
        ((4, 1, 64, 1), (4, 1, 1, 64, 1), (3,)),
        # Where too little lies between the batch and the channels, channels make a group.
        ((9, 1, 64), (9, 1, 1, 64), (3,)),
        ((5000, 4, 256), (5000, 4, 4, 64), (3,)),
    ],
)
def test_known_shapes(
    shape: tuple[int, ...], split: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    groups = plan_groups(shape)
    assert groups is not None
    assert (groups.split_shape, groups.axes) == (split, axes)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 4), (0, 64, 8), (3,), (5, 2), (9, 1, 3)])
def test_shapes_that_cannot_be_grouped(shape: tuple[int, ...]) -> None:
    assert plan_groups(shape) is None


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.sampled_from([4, 16, 64, 100, 1000]))
def test_groups_are_neighbours_off_batch_and_channels(
    shape: tuple[int, ...], group_size: int
) -> None:
    groups = plan_groups(shape, group_size)
    if groups is None:
        return
    assert math.prod(groups.split_shape) == math.prod(shape) == groups.count * groups.size
    assert groups.size >= 4
    assert groups == Groups(shape=shape, axis=groups.axis, last=groups.last, block=groups.block)
    # Label each element with its group: no label crosses the batch axis or, where enough elements
    # lie between the two, the last one.
    grid = np.arange(groups.count).reshape(groups.grid_shape)
    labels = np.broadcast_to(np.expand_dims(grid, groups.axes), groups.split_shape).reshape(shape)
    if len(shape) >= 2:
        _check_apart(labels, axis=0)
    by_channel = len(shape) >= 3 and groups.last == len(shape) - 1
    if len(shape) >= 3 and not by_channel:
        for axis in range(groups.last + 1, len(shape)):
            _check_apart(labels, axis=axis)
        labels = labels.reshape(*shape[: groups.last + 1], -1)[0, ..., 0]
    # Within one sample and channel (and head), a group is one run of neighbours.
    assert (np.diff(labels.reshape(-1)) != 0).sum() == len(np.unique(labels)) - 1 or (
        len(shape) == 2 or by_channel
    )


def _check_apart(labels: np.ndarray, axis: int) -> None:
    rows = np.moveaxis(labels, axis, 0)
    seen = [set(np.unique(row)) for row in rows]
    assert sum(map(len, seen)) == len(set().union(*seen))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4000))
def test_size_is_near_the_target_where_a_divisor_allows(length: int) -> None:
    groups = plan_groups((2, length, 3))
    near = [d for d in range(16, 257) if length % d == 0]
    if near:
        assert groups is not None and groups.size in near
        best = min(abs(math.log(d / 64)) for d in near)
        assert abs(math.log(groups.size / 64)) == pytest.approx(best)
    else:
        assert groups is None or groups.size == length
