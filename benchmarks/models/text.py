"""A causal transformer over characters."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import DTYPES, Task, Wrap, cross_entropy, linen_task, maybe_remat
from benchmarks.models.transformer import Attention, feed_forward

CHARACTERS, LENGTH, WIDTH, HEADS = 128, 64, 64, 4


class CausalBlock(nn.Module):
    """The block of `transformer.py`, in which a character sees those before it alone."""

    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        length = x.shape[-2]
        hidden = jnp.arange(length)[:, None] < jnp.arange(length)[None]
        mask = jnp.where(hidden, -1e9, 0.0).astype(self.dtype)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + Attention(self.heads, self.dtype, use_bias=True)(y, mask[None, None])
        y = nn.LayerNorm(dtype=self.dtype)(x)
        return x + feed_forward(y, self.dtype, use_bias=True)


class CharacterTransformer(nn.Module):
    """Embeddings of characters and positions, `layers` blocks, and a score for each character."""

    layers: int
    dtype: jnp.dtype
    remat: Wrap = False
    characters: int = CHARACTERS
    width: int = WIDTH
    heads: int = HEADS

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.characters, self.width, dtype=self.dtype)(tokens)
        shape = (1, tokens.shape[1], self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), shape).astype(self.dtype)
        block = maybe_remat(CausalBlock, self.remat)
        for i in range(self.layers):
            x = block(self.heads, self.dtype, name=f"Block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.characters, dtype=self.dtype)(x)


def character_transformer(batch: int, layers: int, dtype: str, remat: Wrap) -> Task:
    """Builds the transformer on random characters `[batch, 64]`, each to predict the next one."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        text = jax.random.randint(key, (batch, LENGTH + 1), 0, CHARACTERS)
        return {"tokens": text[:, :-1], "labels": text[:, 1:]}

    module = CharacterTransformer(layers, DTYPES[dtype], remat)
    return linen_task(module, ("tokens",), cross_entropy, draw)
