"""ResNet-20 for small images (He et al., 2016, section 4.2)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import (
    DTYPES,
    Task,
    Wrap,
    cross_entropy,
    linen_task,
    maybe_remat,
    random_images,
)

SIDE, CLASSES = 32, 10


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; where the size changes, the shortcut is a 1x1 convolution."""

    channels: int
    stride: int
    dtype: jnp.dtype
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, self.channels, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not self.train, momentum=0.9, dtype=self.dtype
        )
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm()(conv((3, 3))(y))
        if x.shape != y.shape:
            shortcut = conv((1, 1), self.stride, name="shortcut_conv")(x)
            x = norm(name="shortcut_norm")(shortcut)
        return nn.relu(x + y)


class ResNet20(nn.Module):
    """A stem, three stages of `layers` blocks in all, and a classifier.

    BatchNorm uses the batch's statistics in training, and running ones otherwise.
    """

    layers: int
    dtype: jnp.dtype
    remat: Wrap
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False, dtype=self.dtype)(x)
        norm = nn.BatchNorm(use_running_average=not self.train, momentum=0.9, dtype=self.dtype)
        x = nn.relu(norm(x))
        block = maybe_remat(BasicBlock, self.remat)
        stage = 0
        for i in range(self.layers):
            new_stage = 3 * i // self.layers
            stride = 2 if new_stage > stage else 1
            stage = new_stage
            x = block(16 * 2**stage, stride, self.dtype, self.train, name=f"Block_{i}")(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


def resnet20(batch: int, layers: int, dtype: str, remat: Wrap) -> Task:
    """Builds the network on random images `[batch, 32, 32, 3]`; 9 blocks are ResNet-20."""
    module = ResNet20(layers, DTYPES[dtype], remat)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, SIDE, 3, CLASSES))
