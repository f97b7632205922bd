"""ResNet-50, with the stride on the 3x3 convolution as in torchvision and the Flax examples."""

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

SIDE, CLASSES = 224, 1000


class Bottleneck(nn.Module):
    """The bottleneck block of He et al. (2016), figure 5."""

    channels: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.channels, (3, 3), self.stride)(y)))
        y = norm()(conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="shortcut_norm")(
                conv(4 * self.channels, (1, 1), self.stride, name="shortcut_conv")(x)
            )
        return nn.relu(x + y)


def _stem(module: nn.Module, x: jax.Array) -> jax.Array:
    x = nn.Conv(64, (7, 7), 2, padding=3, use_bias=False, dtype=module.dtype)(x)
    x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=module.dtype)(x))
    return nn.max_pool(x, (3, 3), (2, 2), padding="SAME")


class ResNet(nn.Module):
    """A max-pooled stem, one bottleneck for each entry of `channels`, and a classifier."""

    channels: tuple[int, ...]
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = maybe_wrap(_stem, self.remat)(self, x)
        block = maybe_remat(Bottleneck, self.remat)
        width = self.channels[0]
        for i, channels in enumerate(self.channels):
            # A stage begins where the channels double, and halves the resolution.
            stride = 1 if channels == width else 2
            x = block(channels, stride, self.dtype, name=f"Block_{i}")(x)
            width = channels
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


def block_channels(blocks: int) -> tuple[int, ...]:
    """Returns the inner channels of each block; 16 blocks are ResNet-50, 33 are ResNet-101.

    A deeper network grows in its third stage, as He et al. do; a shallower one stops early.
    """
    third = max(6, blocks - 10)
    return ((64,) * 3 + (128,) * 4 + (256,) * third + (512,) * 3)[:blocks]


def resnet(batch: int, layers: int, dtype: str, remat: bool) -> Task:
    """Builds the network on random images `[batch, 224, 224, 3]`; `layers` counts blocks."""
    module = ResNet(block_channels(layers), DTYPES[dtype], remat)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, SIDE, 3, CLASSES))
