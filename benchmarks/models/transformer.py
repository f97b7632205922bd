"""A pre-norm transformer with its attention written out, as most user code has it.

It has no biases, as T5 (Raffel et al., 2020) has none. The other attention models are made of the
same pieces, with biases.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import DTYPES, Task, linen_task, maybe_remat, squared_error


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017, section 3.2).

    Attributes:
        heads: The number of heads.
        dtype: The compute dtype.
        use_bias: Whether the four projections have biases.
        dropout: The share of the attention weights that is dropped.

    Called with the tokens `[..., length, width]` and, if any, with what is added to the scores
    `[..., heads, length, length]`.
    """

    heads: int
    dtype: jnp.dtype
    use_bias: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        def project(name: str) -> jax.Array:
            y = nn.Dense(x.shape[-1], use_bias=self.use_bias, dtype=self.dtype, name=name)(x)
            return y.reshape(*y.shape[:-1], self.heads, -1)

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("...qhd,...khd->...hqk", query, key) * query.shape[-1] ** -0.5
        if bias is not None:
            scores = scores + bias
        weights = nn.Dropout(self.dropout, deterministic=False)(nn.softmax(scores))
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        mixed = mixed.reshape(x.shape)
        return nn.Dense(x.shape[-1], use_bias=self.use_bias, dtype=self.dtype, name="out")(mixed)


def feed_forward(x: jax.Array, dtype: jnp.dtype, use_bias: bool) -> jax.Array:
    """Applies two dense layers, the inner one four times as wide, inside the calling module."""
    width = x.shape[-1]
    y = nn.gelu(nn.Dense(4 * width, use_bias=use_bias, dtype=dtype)(x))
    return nn.Dense(width, use_bias=use_bias, dtype=dtype)(y)


class Block(nn.Module):
    """Attention and a GELU feed-forward layer, each normalised first and added to its input."""

    heads: int
    dtype: jnp.dtype
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype, use_bias=self.use_bias)(x)
        x = x + Attention(self.heads, self.dtype, self.use_bias)(y)
        y = nn.LayerNorm(dtype=self.dtype, use_bias=self.use_bias)(x)
        return x + feed_forward(y, self.dtype, self.use_bias)


class Transformer(nn.Module):
    """A stack of `layers` blocks over embeddings `[batch, length, width]`."""

    layers: int
    heads: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        block = maybe_remat(Block, self.remat)
        for i in range(self.layers):
            x = block(self.heads, self.dtype, name=f"Block_{i}")(x)
        return x


def transformer(
    batch: int,
    layers: int,
    dtype: str,
    remat: bool,
    *,
    width: int,
    heads: int,
    length: int,
    stack: Callable[..., nn.Module] = Transformer,
) -> Task:
    """Builds the transformer on random embeddings and targets `[batch, length, width]`.

    `stack` makes the module, of the arguments that `Transformer` takes.
    """

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        embedding_key, target_key = jax.random.split(key)
        shape = (batch, length, width)
        return {
            "embeddings": jax.random.normal(embedding_key, shape),
            "targets": jax.random.normal(target_key, shape),
        }

    module = stack(layers, heads, DTYPES[dtype], remat)
    return linen_task(module, ("embeddings",), squared_error, draw)
