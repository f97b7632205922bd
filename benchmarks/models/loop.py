"""Blocks of the same shape as one loop, as long stacks are written to compile fast."""

import functools

import flax.linen as nn
import jax

from benchmarks.models.task import Wrap


def step(block: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    """Applies one block, in the form of a scan's body."""
    return block(x), None


def apply_loop(block: nn.Module, x: jax.Array, length: int, remat: Wrap = False) -> jax.Array:
    """Applies `length` copies of a block one after the other, their parameters stacked.

    Args:
        block: The block; each copy has its own parameters, statistics and random numbers.
        x: What the first one is applied to; all results have its shape and dtype.
        length: How many there are.
        remat: What wraps the loop's body. Where it is True, `prevent_cse` is off, as Flax advises
            under a scan: XLA cannot merge the two forward passes there anyway.

    Returns:
        What the last one makes of it.
    """
    wrap = functools.partial(nn.remat, prevent_cse=False) if remat is True else remat
    scan = nn.scan(
        wrap(step) if wrap else step,
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True, "dropout": True},
        length=length,
    )
    x, _ = scan(block, x, None)
    return x
