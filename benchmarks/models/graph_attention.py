"""A graph attention network on the graph of `models/graph.py` (Veličković et al., 2018)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.graph import CLASSES, digits_graph, masked_cross_entropy
from benchmarks.models.task import DTYPES, Task, Wrap, linen_task, maybe_remat

HEADS, FEATURES = 8, 8


class GraphAttention(nn.Module):
    """Averages the neighbours' features, weighted by attention, for each head apart.

    The score of an edge is a LeakyReLU of a number of its sender plus one of its receiver; softmax
    is over the edges that arrive at a node (equations 1 to 4).
    """

    heads: int
    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        nodes = len(x)
        x = nn.DenseGeneral((self.heads, self.features), use_bias=False, dtype=self.dtype)(x)
        scorer = nn.initializers.normal(self.features**-0.5)
        shape = (self.heads, self.features)
        of_sender = (x * self.param("of_sender", scorer, shape)[None].astype(self.dtype)).sum(-1)
        of_receiver = (x * self.param("of_receiver", scorer, shape)[None].astype(self.dtype)).sum(
            -1
        )
        scores = nn.leaky_relu(of_sender[senders] + of_receiver[receivers], 0.2)
        highest = jax.lax.stop_gradient(jax.ops.segment_max(scores, receivers, nodes))
        weights = jnp.exp(scores - highest[receivers])
        weights = weights / jax.ops.segment_sum(weights, receivers, nodes)[receivers]
        mixed = jax.ops.segment_sum(x[senders] * weights[..., None], receivers, nodes)
        return mixed.reshape(nodes, self.heads * self.features)


class GAT(nn.Module):
    """`layers` attention layers of eight heads, ELU between them, the last one of one head."""

    layers: int
    dtype: jnp.dtype
    remat: Wrap = False

    @nn.compact
    def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        attention = maybe_remat(GraphAttention, self.remat)
        for i in range(self.layers):
            last = i == self.layers - 1
            heads, features = (1, CLASSES) if last else (HEADS, FEATURES)
            layer = attention(heads, features, self.dtype, name=f"GraphAttention_{i}")
            x = layer(x, senders, receivers)
            x = x if last else nn.elu(x)
        return x


def gat(batch: int, layers: int, dtype: str, remat: Wrap) -> Task:
    """Builds the network on the graph of `batch` digits, which is real data: keys are unused."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        del key
        return jax.tree.map(jnp.asarray, digits_graph(batch))

    module = GAT(layers, DTYPES[dtype], remat)
    return linen_task(module, ("features", "senders", "receivers"), masked_cross_entropy, draw)
