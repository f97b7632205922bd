"""BERT large (Devlin et al., 2019), fine-tuned on the classification of sentences."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.loop import apply_loop
from benchmarks.models.task import DTYPES, Task, Wrap, cross_entropy, linen_task, maybe_remat
from benchmarks.models.transformer import Attention, feed_forward

WIDTH, LENGTH, HEAD_WIDTH, VOCABULARY, CLASSES, DROPOUT = 1024, 128, 64, 30522, 2, 0.1


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input and then normalised."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        drop = functools.partial(nn.Dropout, DROPOUT, deterministic=False)
        heads = x.shape[-1] // HEAD_WIDTH
        y = Attention(heads, self.dtype, use_bias=True, dropout=DROPOUT)(x)
        x = norm()(x + drop()(y))
        return norm()(x + drop()(feed_forward(x, self.dtype, use_bias=True)))


class BERT(nn.Module):
    """Embeddings of tokens and positions, `layers` blocks, and a classifier of the first token.

    With `looped`, the blocks are one loop, their parameters stacked.
    """

    layers: int
    dtype: jnp.dtype
    remat: Wrap
    width: int = WIDTH
    looped: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.dtype)
        x = embed(VOCABULARY, name="tokens")(tokens)
        x = x + embed(tokens.shape[1], name="positions")(jnp.arange(tokens.shape[1])[None])
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.Dropout(DROPOUT, deterministic=False)(x)
        if self.looped:
            x = apply_loop(Block(self.dtype, name="Block"), x, self.layers, self.remat)
        else:
            block = maybe_remat(Block, self.remat)
            for i in range(self.layers):
                x = block(self.dtype, name=f"Block_{i}")(x)
        pooled = nn.tanh(nn.Dense(self.width, dtype=self.dtype, name="pooler")(x[:, 0]))
        pooled = nn.Dropout(DROPOUT, deterministic=False)(pooled)
        return nn.Dense(CLASSES, dtype=self.dtype, name="classifier")(pooled)


def bert(
    batch: int,
    layers: int,
    dtype: str,
    remat: Wrap,
    *,
    width: int = WIDTH,
    length: int = LENGTH,
    looped: bool = False,
) -> Task:
    """Builds the encoder on random tokens `[batch, length]`; the batch holds the key of dropout.

    `width` is a multiple of 64, the width of a head.
    """

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        token_key, label_key, dropout_key = jax.random.split(key, 3)
        return {
            "tokens": jax.random.randint(token_key, (batch, length), 0, VOCABULARY),
            "labels": jax.random.randint(label_key, (batch,), 0, CLASSES),
            "dropout": dropout_key,
        }

    module = BERT(layers, DTYPES[dtype], remat, width, looped)
    return linen_task(module, ("tokens",), cross_entropy, draw, rngs=("dropout",))
