"""A plain residual network of 3x3 convolutions with BatchNorm, all at one resolution."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import (
    DTYPES,
    Task,
    cross_entropy,
    linen_task,
    maybe_remat,
    maybe_wrap,
    random_images,
)

SIDE, CLASSES = 32, 10


class Block(nn.Module):
    """The basic block of He et al. (2016), section 3.1: `relu(x + bn(conv(relu(bn(conv(x))))))`."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, self.channels, (3, 3), use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv()(x)))
        return nn.relu(x + norm()(conv()(y)))


def _stem(module: nn.Module, x: jax.Array) -> jax.Array:
    x = nn.Conv(module.channels, (3, 3), use_bias=False, dtype=module.dtype)(x)
    return nn.relu(nn.BatchNorm(use_running_average=False, dtype=module.dtype)(x))


class ConvNet(nn.Module):
    """A stem, `layers` basic blocks, global average pooling and a classifier."""

    layers: int
    channels: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = maybe_wrap(_stem, self.remat)(self, x)
        block = maybe_remat(Block, self.remat)
        for i in range(self.layers):
            x = block(self.channels, self.dtype, name=f"Block_{i}")(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


def convnet(batch: int, layers: int, dtype: str, remat: bool, *, channels: int) -> Task:
    """Builds the network on random images `[batch, 32, 32, 3]`; `layers` counts blocks."""
    module = ConvNet(layers, channels, DTYPES[dtype], remat)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, SIDE, 3, CLASSES))
