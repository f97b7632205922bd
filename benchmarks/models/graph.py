"""A graph convolutional network on the nearest-neighbour graph of scikit-learn's digits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models.task import DTYPES, Task, linen_task, maybe_remat

NEIGHBOURS, WIDTH, CLASSES, TRAIN_SHARE = 8, 64, 10, 0.1


@functools.lru_cache
def digits_graph(nodes: int) -> dict[str, np.ndarray]:
    """Builds the graph of the first `nodes` digits.

    Args:
        nodes: How many digits to take, up to 1,797.

    Returns:
        The node features `[nodes, 64]` and labels, the edges as `senders` and `receivers` (both
        directions, with self-loops) with their symmetrically normalised weights (Kipf & Welling,
        2017, equation 2), and `train_mask`, which tells the nodes whose label the loss may see.
    """
    # Only this model needs scikit-learn, and its import is slow.
    from sklearn import datasets, neighbors

    features, labels = datasets.load_digits(return_X_y=True)
    features, labels = (features[:nodes] / 16).astype(np.float32), labels[:nodes].astype(np.int32)
    nearest = min(NEIGHBOURS, len(features) - 1)
    graph = neighbors.kneighbors_graph(features, nearest, include_self=False).toarray()
    graph = np.maximum(graph, graph.T) + np.eye(len(graph))
    senders, receivers = np.nonzero(graph)
    degree = graph.sum(axis=1)
    chosen = np.random.default_rng(0).random(len(features)) < TRAIN_SHARE
    chosen[0] = True  # However small the graph, the loss has a node to average over.
    return {
        "features": features,
        "labels": labels,
        "senders": senders.astype(np.int32),
        "receivers": receivers.astype(np.int32),
        "weights": ((degree[senders] * degree[receivers]) ** -0.5).astype(np.float32),
        "train_mask": chosen,
    }


class GraphConvolution(nn.Module):
    """Projects the nodes, sends the result along each edge, and sums what arrives."""

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: jax.Array, senders: jax.Array, receivers: jax.Array, weights: jax.Array
    ) -> jax.Array:
        x = nn.Dense(self.features, dtype=self.dtype)(x)
        messages = x[senders] * weights[:, None].astype(self.dtype)
        return jax.ops.segment_sum(messages, receivers, num_segments=len(x))


class GCN(nn.Module):
    """`layers` graph convolutions with ReLU between them."""

    layers: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, senders: jax.Array, receivers: jax.Array, weights: jax.Array
    ) -> jax.Array:
        convolution = maybe_remat(GraphConvolution, self.remat)
        for i in range(self.layers):
            last = i == self.layers - 1
            features = CLASSES if last else WIDTH
            layer = convolution(features, self.dtype, name=f"GraphConvolution_{i}")
            x = layer(x, senders, receivers, weights)
            x = x if last else nn.relu(x)
        return x


def masked_cross_entropy(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy over the nodes of the train mask."""
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(where=batch["train_mask"])


def gcn(batch: int, layers: int, dtype: str, remat: bool) -> Task:
    """Builds the network on the graph of `batch` digits, which is real data: keys are unused."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        del key
        return jax.tree.map(jnp.asarray, digits_graph(batch))

    inputs = ("features", "senders", "receivers", "weights")
    module = GCN(layers, DTYPES[dtype], remat)
    return linen_task(module, inputs, masked_cross_entropy, draw)
