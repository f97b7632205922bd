"""A pre-activation ResNet of any depth (He et al., "Identity Mappings", 2016), stages as loops."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.loop import apply_loop
from benchmarks.models.task import (
    DTYPES,
    Task,
    Wrap,
    cross_entropy,
    linen_task,
    maybe_remat,
    random_images,
)

SIDE, CLASSES, STAGES = 32, 10, 3


class Bottleneck(nn.Module):
    """Three convolutions, each after BatchNorm and ReLU, added to the block's input."""

    channels: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        out = 4 * self.channels
        y = nn.relu(norm()(x))
        if x.shape[-1] != out or self.stride != 1:
            x = conv(out, (1, 1), self.stride, name="shortcut")(y)
        y = conv(self.channels, (1, 1), self.stride)(y)
        y = conv(self.channels, (3, 3))(nn.relu(norm()(y)))
        return x + conv(out, (1, 1))(nn.relu(norm()(y)))


class DeepResNet(nn.Module):
    """A stem and three stages of `layers` blocks each: `9 * layers + 2` layers in all.

    The first block of a stage changes the shape; the others are one loop, as a thousand layers
    written out would take an hour to compile.
    """

    layers: int
    channels: int
    dtype: jnp.dtype
    remat: Wrap = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=self.dtype)(x)
        block = maybe_remat(Bottleneck, self.remat)
        for stage in range(STAGES):
            channels = self.channels * 2**stage
            x = block(channels, 1 if stage == 0 else 2, self.dtype, name=f"First_{stage}")(x)
            if self.layers > 1:
                others = block(channels, 1, self.dtype, name=f"Stage_{stage}")
                x = apply_loop(others, x, self.layers - 1)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


def deep_resnet(
    batch: int, layers: int, dtype: str, remat: Wrap, *, channels: int = 16, side: int = SIDE
) -> Task:
    """Builds the network on random images `[batch, side, side, 3]`; 111 blocks are ResNet-1001."""
    module = DeepResNet(layers, channels, DTYPES[dtype], remat)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, side, 3, CLASSES))
