"""Swin-T, a transformer over shifted windows (Liu et al., 2021), without its stochastic depth."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.task import (
    DTYPES,
    Task,
    cross_entropy,
    linen_task,
    maybe_remat,
    random_images,
)
from benchmarks.models.transformer import Attention, feed_forward

SIDE, PATCH, WIDTH, HEADS, WINDOW, CLASSES = 224, 4, 96, 3, 7, 1000


def split_windows(x: jax.Array) -> jax.Array:
    """Cuts maps `[batch, side, side, width]` into `[batch, windows, tokens, width]`."""
    batch, side, _, width = x.shape
    count = side // WINDOW
    x = x.reshape(batch, count, WINDOW, count, WINDOW, width).swapaxes(2, 3)
    return x.reshape(batch, count**2, WINDOW**2, width)


def join_windows(x: jax.Array, side: int) -> jax.Array:
    """Undoes `split_windows`."""
    count = side // WINDOW
    x = x.reshape(len(x), count, count, WINDOW, WINDOW, -1).swapaxes(2, 3)
    return x.reshape(len(x), side, side, -1)


def relative_positions() -> np.ndarray:
    """Returns, for each pair of tokens in a window, which offset is between them."""
    grid = np.stack(np.divmod(np.arange(WINDOW**2), WINDOW), axis=-1)
    offsets = grid[:, None] - grid[None] + WINDOW - 1
    return offsets[..., 0] * (2 * WINDOW - 1) + offsets[..., 1]


def shift_mask(side: int, shift: int) -> np.ndarray:
    """Returns what is added to the scores of rolled maps.

    Tokens that the roll made neighbours, across an edge of the map, do not see each other. The
    axes are those of the scores `[batch, windows, heads, tokens, tokens]`.
    """
    band = np.searchsorted([side - WINDOW, side - shift], np.arange(side), side="right")
    count = side // WINDOW
    regions = (3 * band[:, None] + band).reshape(count, WINDOW, count, WINDOW).swapaxes(1, 2)
    regions = regions.reshape(1, count**2, 1, WINDOW**2)
    return np.where(regions[..., None] == regions[..., None, :], 0, -100).astype(np.float32)


class WindowAttention(nn.Module):
    """Attention inside each window of the maps, rolled by `shift` first and back afterwards."""

    heads: int
    shift: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        side, offsets = x.shape[1], (2 * WINDOW - 1) ** 2
        table = self.param("bias", nn.initializers.truncated_normal(0.02), (offsets, self.heads))
        bias = table[relative_positions()].transpose(2, 0, 1)[None, None]
        if self.shift:
            bias = bias + shift_mask(side, self.shift)
            x = jnp.roll(x, (-self.shift, -self.shift), (1, 2))
        attention = Attention(self.heads, self.dtype, use_bias=True)
        x = join_windows(attention(split_windows(x), bias.astype(self.dtype)), side)
        return jnp.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class Block(nn.Module):
    """Window attention and a feed-forward layer, each normalised first and added to its input."""

    heads: int
    shift: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + WindowAttention(self.heads, self.shift, self.dtype)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        return x + feed_forward(y, self.dtype, use_bias=True)


class PatchMerging(nn.Module):
    """Halves the resolution and doubles the width."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, side, _, width = x.shape
        x = x.reshape(batch, side // 2, 2, side // 2, 2, width).swapaxes(2, 3)
        x = x.reshape(batch, side // 2, side // 2, 4 * width)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(2 * width, use_bias=False, dtype=self.dtype)(x)


class Swin(nn.Module):
    """A patch embedding, one stage for each entry of `depths`, and a classifier."""

    depths: tuple[int, ...]
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), PATCH, padding="VALID", dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        block = maybe_remat(Block, self.remat)
        for stage, depth in enumerate(self.depths):
            if stage:
                x = PatchMerging(self.dtype)(x)
            # Every second block is shifted, except where one window is the whole map.
            shifts = (0, 0 if x.shape[1] == WINDOW else WINDOW // 2)
            for i in range(depth):
                heads, name = HEADS * 2**stage, f"Stage_{stage}_Block_{i}"
                x = block(heads, shifts[i % 2], self.dtype, name=name)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean((1, 2))
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


def swin(batch: int, layers: int, dtype: str, remat: bool) -> Task:
    """Builds the network on random images; `layers` counts the blocks of the third stage."""
    module = Swin((2, 2, layers, 2), DTYPES[dtype], remat)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, SIDE, 3, CLASSES))
