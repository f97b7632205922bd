"""Averages over windows of a sequence as one Mosaic TPU kernel: the input is read once.

The entries of such a window lie one below the other in a tile. XLA turns the array around in memory
to add them up; loads with a stride need no copy. Over the windows of images XLA's own kernel moves
the least bytes, so there is none here.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact_kernels import compat
from jact_kernels.pool import reference

LANES = 128
"""Channels in a block: Mosaic loads with a stride from arrays of just this width."""

SUBLANES = 32
"""The most rows in a tile of any dtype: to cut an array between tiles moves nothing."""

MAX_BLOCK_ELEMENTS = 2**18
"""A block, twice, its copy and its averages, twice, take about 4 of VMEM's 16 MiB."""

DTYPES = ("bfloat16", "float32")


def unsupported(
    shape: tuple[int, ...], dtypes: Sequence[DTypeLike], window: int, axes: tuple[int, ...]
) -> str | None:
    """Why this kernel cannot take these arrays, or None if it can."""
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in DTYPES:
            return f"{jnp.dtype(dtype).name} is left to XLA"
    if 0 in shape:
        return "there is nothing to do"
    if axes != (len(shape) - 2,):
        return "windows along other axes than the last but one are left to XLA"
    if shape[-1] < LANES:
        return f"fewer than {LANES} channels lie in memory otherwise, and would be copied"
    tile = SUBLANES * window
    if shape[-2] % tile:
        return f"averages lie in tiles of {SUBLANES}, and {tile} does not divide {shape[-2]}"
    if tile * LANES > MAX_BLOCK_ELEMENTS:
        return f"windows of {window} are too large for a block"
    return None


def average_pool(
    x: jax.Array, *, window: int, axes: tuple[int, ...], dtype: DTypeLike, interpret: bool = False
) -> jax.Array:
    """Averages `x`; see `jact_kernels.average_pool`."""
    pl, pltpu = compat.mosaic_tpu()
    tile, channels = SUBLANES * window, x.shape[-1]
    pieces = math.prod(x.shape[:-1]) // tile
    together = min(pieces, MAX_BLOCK_ELEMENTS // (tile * LANES))
    block, averaged = (together, tile, LANES), (together, SUBLANES, LANES)

    def body(x_ref: Any, out_ref: Any, shares_ref: Any) -> None:
        # Only arrays of 32 bits can be loaded from with a stride.
        shares_ref[...] = x_ref[...].astype(jnp.float32) * jnp.float32(1 / window)
        entries = (shares_ref[:, pl.ds(i, SUBLANES, window)] for i in range(window))
        out_ref[...] = functools.reduce(jnp.add, entries).astype(dtype)

    def whole(shape: tuple[int, ...]) -> Any:
        return pl.BlockSpec(shape, lambda piece, channel: (piece, 0, channel))

    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((pieces, SUBLANES, channels), dtype),
        # The last blocks may reach beyond the array, where nothing is written.
        grid=(-(-pieces // together), -(-channels // LANES)),
        in_specs=(whole(block),),
        out_specs=whole(averaged),
        scratch_shapes=(pltpu.VMEM(block, jnp.float32),),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="average_pool",
    )(x.reshape(pieces, tile, channels))
    return out.reshape(reference.pooled_shape(x.shape, window, axes))
