"""The vision transformer ViT-B/16 (Dosovitskiy et al., 2021)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import (
    DTYPES,
    Task,
    Wrap,
    cross_entropy,
    linen_task,
    maybe_remat,
    random_images,
)
from benchmarks.models.transformer import Block

SIDE, PATCH, WIDTH, HEADS, CLASSES = 224, 16, 768, 12, 1000


class ViT(nn.Module):
    """Patches and a class token, `layers` pre-norm blocks, and a classifier of the class token."""

    layers: int
    dtype: jnp.dtype
    remat: Wrap
    patch: int = PATCH
    width: int = WIDTH
    heads: int = HEADS
    classes: int = CLASSES

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sides = (self.patch, self.patch)
        x = nn.Conv(self.width, sides, sides, padding="VALID", dtype=self.dtype)(x)
        x = x.reshape(len(x), -1, self.width)
        first = self.param("class_token", nn.initializers.zeros, (1, 1, self.width))
        first = jnp.broadcast_to(first.astype(self.dtype), (len(x), 1, self.width))
        x = jnp.concatenate([first, x], axis=1)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + positions.astype(self.dtype)
        block = maybe_remat(Block, self.remat)
        for i in range(self.layers):
            x = block(self.heads, self.dtype, use_bias=True, name=f"Block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype)(x[:, 0])
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def vit(batch: int, layers: int, dtype: str, remat: Wrap) -> Task:
    """Builds the network on random images `[batch, 224, 224, 3]`."""
    module = ViT(layers, DTYPES[dtype], remat)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, SIDE, 3, CLASSES))
