"""Which elements share a range: whole axes or blocks of one axis, reduced in place."""

import dataclasses
import math

MIN_GROUP = 4
"""Fewer elements than this do not pay for the 32 bits of their range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Groups:
    """How an array is divided into groups, as static Python values.

    A group is a block of `block` entries of `axis` times the whole of the axes after it, up to
    `last`. Splitting `axis` in two is the only reshape that it takes, so the array keeps its layout
    and its sharding.

    Attributes:
      shape: the shape of the array.
      axis: the outermost axis that lies in a group.
      last: the innermost axis that lies in a group.
      block: how many consecutive entries of `axis` lie in one group; divides `shape[axis]`.
    """

    shape: tuple[int, ...]
    axis: int
    last: int
    block: int

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The shape with `axis` split into (number of blocks, block)."""
        blocks = self.shape[self.axis] // self.block
        return (*self.shape[: self.axis], blocks, self.block, *self.shape[self.axis + 1 :])

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of `split_shape` that one group spans."""
        return tuple(range(self.axis + 1, self.last + 2))

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """The shape of an array that has one entry per group."""
        split = self.split_shape
        return tuple(size for axis, size in enumerate(split) if axis not in self.axes)

    @property
    def size(self) -> int:
        """The number of elements in a group."""
        return math.prod(self.split_shape[axis] for axis in self.axes)

    @property
    def count(self) -> int:
        """The number of groups."""
        return math.prod(self.grid_shape)


def plan_groups(
    shape: tuple[int, ...], group_size: int = 64, axis: int | None = None
) -> Groups | None:
    """Divides an array into groups of about `group_size` neighbouring elements.

    The leading axis (the batch) is never in a group of an array of two or more axes, and the last
    one (channels, which are often sharded) only where the others are too short. Of the others the
    first is taken alone where it is long enough: in an array of (batch, tokens, heads, features)
    heads are often sharded as well. Blocks divide their axis, so nothing is ever padded. An axis
    without a divisor near the target is taken whole.

    Args:
      shape: the shape of the array.
      group_size: how many elements a group should have; the result lies within a factor of four
        where the shape allows it.
      axis: the one axis along which groups are to lie, whatever the above; it may be the leading
        one, and negative as in NumPy.

    Returns:
      The groups, or None for an array that cannot be divided so: a scalar, an array without
      elements, one without that axis, or one where a group would have fewer than four elements.

    Example:
      >>> from jact_kernels import plan_groups
      >>> plan_groups((16, 512, 768)).split_shape  # Blocks of 64 tokens of one channel.
      (16, 8, 64, 768)
      >>> plan_groups((128, 32, 32, 64)).split_shape  # Two image rows of one channel.
      (128, 16, 2, 32, 64)
      >>> plan_groups((16, 512, 12, 64)).split_shape  # Blocks of 64 tokens of one head's feature.
      (16, 8, 64, 12, 64)
      >>> plan_groups((64, 7, 7, 2048)).size
      49
      >>> plan_groups((5000, 4, 256)).split_shape  # Nodes, heads, features.
      (5000, 4, 4, 64)
      >>> plan_groups((16, 512, 768), axis=-1).split_shape
      (16, 512, 12, 64)
      >>> plan_groups(()) is None
      True
    """
    if not shape or 0 in shape:
        return None
    if axis is not None:
        if not -len(shape) <= axis < len(shape):
            return None
        groups = _groups(tuple(shape), axis % len(shape), axis % len(shape), group_size)
        return groups if groups.size >= MIN_GROUP else None
    first, last = _groupable_axes(len(shape))
    groups = _groups(tuple(shape), first, first, group_size)
    if groups.size < 0.75 * group_size:
        groups = _groups(tuple(shape), first, last, group_size)
    if len(shape) > 2 and groups.size < group_size / 4:
        # Too few elements lie between the batch and the channels, as in (nodes, heads, features).
        channels = _groups(tuple(shape), len(shape) - 1, len(shape) - 1, group_size)
        groups = max(groups, channels, key=lambda g: g.size)
    return groups if groups.size >= MIN_GROUP else None


def _groups(shape: tuple[int, ...], first: int, last: int, group_size: int) -> Groups:
    """Groups along the axes from `first` to `last`, the innermost ones taken first."""
    axis, inner = last, 1
    while axis > first and inner * shape[axis] < group_size:
        inner *= shape[axis]
        axis -= 1
    block = _block_length(shape[axis], inner, group_size)
    if block == 1 and axis < last:
        axis, block = axis + 1, shape[axis + 1]
    return Groups(shape=shape, axis=axis, last=last, block=block)


def _groupable_axes(ndim: int) -> tuple[int, int]:
    """The first and the last axis that may lie in a group."""
    if ndim == 1:
        return 0, 0
    return 1, max(1, ndim - 2)


def _block_length(length: int, inner: int, group_size: int) -> int:
    """The divisor of `length` that, times `inner`, comes nearest to `group_size`."""
    smallest = max(MIN_GROUP, group_size / 4)
    divisors = [
        block
        for block in range(1, min(length, 4 * group_size // inner) + 1)
        if length % block == 0 and inner * block >= smallest
    ]
    if not divisors:
        return length
    return min(divisors, key=lambda block: abs(math.log(inner * block / group_size)))
