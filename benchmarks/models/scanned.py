"""The transformer with its blocks under `nn.scan`, as long stacks are written to compile fast."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.transformer import Block


def step(block: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    """Applies one block, in the form of a scan's body."""
    return block(x), None


class ScannedTransformer(nn.Module):
    """`Transformer`, each of its parameters stacked over the layers.

    `remat` keeps the input of each iteration alone. `prevent_cse` is off, as Flax advises under a
    scan, where XLA cannot merge the two forward passes anyway.
    """

    layers: int
    heads: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        body = nn.remat(step, prevent_cse=False) if self.remat else step
        scan = nn.scan(
            body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x, _ = scan(Block(self.heads, self.dtype, name="Block"), x.astype(self.dtype), None)
        return x
