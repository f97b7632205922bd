"""The transformer with its blocks under `nn.scan`, as long stacks are written to compile fast."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.loop import apply_loop
from benchmarks.models.task import Wrap
from benchmarks.models.transformer import Block


class ScannedTransformer(nn.Module):
    """`Transformer`, each of its parameters stacked over the layers.

    `remat` wraps the body of the loop.
    """

    layers: int
    heads: int
    dtype: jnp.dtype
    remat: Wrap

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = Block(self.heads, self.dtype, name="Block")
        return apply_loop(block, x.astype(self.dtype), self.layers, self.remat)
