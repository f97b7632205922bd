"""A multilayer perceptron with ReLU."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import DTYPES, Task, cross_entropy, linen_task, maybe_remat

FEATURES, WIDTH, CLASSES = 64, 256, 10


class Block(nn.Module):
    """One dense layer and its activation."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.relu(nn.Dense(WIDTH, dtype=self.dtype)(x))


class MLP(nn.Module):
    """`layers` hidden layers and a classifier."""

    layers: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = maybe_remat(Block, self.remat)
        for i in range(self.layers):
            x = block(self.dtype, name=f"Block_{i}")(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


def mlp(batch: int, layers: int, dtype: str, remat: bool) -> Task:
    """Builds the perceptron on random features `[batch, 64]`."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        feature_key, label_key = jax.random.split(key)
        return {
            "features": jax.random.normal(feature_key, (batch, FEATURES)),
            "labels": jax.random.randint(label_key, (batch,), 0, CLASSES),
        }

    module = MLP(layers, DTYPES[dtype], remat)
    return linen_task(module, ("features",), cross_entropy, draw)
