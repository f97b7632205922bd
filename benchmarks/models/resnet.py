"""ResNet-50 and its like.

The stride is on the 3x3 convolution, as in torchvision and the Flax examples.
"""

import functools
from collections.abc import Callable

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
    maybe_wrap,
    random_images,
)

SIDE, CLASSES = 224, 1000


class Bottleneck(nn.Module):
    """The bottleneck block of He et al. (2016), figure 5.

    `width` is that of the 3x3 convolution; 4 * `channels` are the channels of the result.
    """

    channels: int
    width: int
    stride: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride)(y)))
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
    """A max-pooled stem, stages of bottlenecks, and a classifier.

    Attributes:
        stages: The number of blocks in each stage. A stage has twice the channels of the one
            before, and half the resolution.
        dtype: The compute dtype.
        remat: What wraps the stem and each block.
        width: The width of the 3x3 convolutions in the first stage, 64 in ResNets of any depth.
        looped: Whether all blocks of a stage but its first, which changes the shape, are one loop.
    """

    stages: tuple[int, ...]
    dtype: jnp.dtype
    remat: Wrap
    width: int = 64
    looped: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = maybe_wrap(_stem, self.remat)(self, x)
        block = maybe_remat(Bottleneck, self.remat)
        index = 0
        for stage, blocks in enumerate(self.stages):
            sizes = 64 * 2**stage, self.width * 2**stage
            for i in range(1 if self.looped else blocks):
                stride = 2 if stage and i == 0 else 1
                x = block(*sizes, stride, self.dtype, name=f"Block_{index}")(x)
                index += 1
            if self.looped and blocks > 1:
                others = Bottleneck(*sizes, 1, self.dtype, name=f"Stage_{stage}")
                x = apply_loop(others, x, blocks - 1, self.remat)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2)))


def like_resnet50(blocks: int) -> tuple[int, ...]:
    """Returns the blocks of each stage; 16 are ResNet-50, 33 are ResNet-101.

    A deeper network grows in its third stage, as He et al. do; a shallower one stops early.
    """
    stages, left = [], blocks
    for usual in (3, 4, max(6, blocks - 10), 3):
        stages.append(min(usual, left))
        left -= stages[-1]
    return tuple(n for n in stages if n)


def like_resnet152(blocks: int) -> tuple[int, ...]:
    """Returns the blocks of each stage; 50 are ResNet-152.

    Other depths grow or shrink in the second and third stage by 8 to 36, the blocks that ResNet-152
    has there, as Liu et al. (2022) scale it; 10 are the fewest.
    """
    second = max(1, 8 + (blocks - 50) * 8 // 44)
    return 3, second, blocks - second - 6, 3


def resnet(
    batch: int,
    layers: int,
    dtype: str,
    remat: Wrap,
    *,
    stages: Callable[[int], tuple[int, ...]] = like_resnet50,
    width: int = 64,
    side: int = SIDE,
    looped: bool = False,
) -> Task:
    """Builds the network on random images `[batch, side, side, 3]`; `layers` counts blocks.

    `stages` distributes them; see `ResNet` for `width` and `looped`.
    """
    module = ResNet(stages(layers), DTYPES[dtype], remat, width, looped)
    return linen_task(module, ("images",), cross_entropy, random_images(batch, side, 3, CLASSES))
