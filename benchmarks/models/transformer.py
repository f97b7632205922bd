"""A pre-norm transformer with its attention written out, as most user code has it.

It has no biases, as T5 (Raffel et al., 2020) has none.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import DTYPES, Task, linen_task, maybe_remat


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017, section 3.2)."""

    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def project(name: str) -> jax.Array:
            y = nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name=name)(x)
            return y.reshape(*y.shape[:-1], self.heads, -1)

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        mixed = mixed.reshape(x.shape)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="out")(mixed)


class Block(nn.Module):
    """Attention and a GELU feed-forward layer, each normalised first and added to its input."""

    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype, use_bias=False)(x)
        x = x + Attention(self.heads, self.dtype)(y)
        y = nn.LayerNorm(dtype=self.dtype, use_bias=False)(x)
        y = nn.gelu(nn.Dense(4 * width, use_bias=False, dtype=self.dtype)(y))
        return x + nn.Dense(width, use_bias=False, dtype=self.dtype)(y)


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


def squared_error(output: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean squared error, in float32, against the batch's targets."""
    return jnp.mean((output.astype(jnp.float32) - batch["targets"]) ** 2)


def transformer(
    batch: int, layers: int, dtype: str, remat: bool, *, width: int, heads: int, length: int
) -> Task:
    """Builds the transformer on random embeddings and targets `[batch, length, width]`."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        embedding_key, target_key = jax.random.split(key)
        shape = (batch, length, width)
        return {
            "embeddings": jax.random.normal(embedding_key, shape),
            "targets": jax.random.normal(target_key, shape),
        }

    module = Transformer(layers, heads, DTYPES[dtype], remat)
    return linen_task(module, ("embeddings",), squared_error, draw)
