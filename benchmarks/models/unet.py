"""A U-Net (Ronneberger et al., 2015) with GroupNorm and SiLU that predicts the noise in images."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import (
    DTYPES,
    Task,
    linen_task,
    maybe_remat,
    random_images,
    squared_error,
)

SIDE, WIDTH, COLOURS = 128, 64, 3


class Block(nn.Module):
    """Two 3x3 convolutions, each followed by GroupNorm and SiLU."""

    channels: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.silu(nn.GroupNorm(dtype=self.dtype)(x))
        return x


class UNet(nn.Module):
    """One block for each level on the way down, and one for all but the lowest on the way up."""

    levels: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = maybe_remat(Block, self.remat)
        skips = []
        for i in range(self.levels):
            x = nn.max_pool(x, (2, 2), (2, 2)) if i else x.astype(self.dtype)
            x = block(WIDTH * 2**i, self.dtype, name=f"Down_{i}")(x)
            skips.append(x)
        for i in reversed(range(self.levels - 1)):
            x = nn.ConvTranspose(WIDTH * 2**i, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = jnp.concatenate([skips[i], x], axis=-1)
            x = block(WIDTH * 2**i, self.dtype, name=f"Up_{i}")(x)
        return nn.Conv(COLOURS, (1, 1), dtype=self.dtype)(x)


def unet(batch: int, layers: int, dtype: str, remat: bool) -> Task:
    """Builds the network on noisy images `[batch, 128, 128, 3]`; `layers` counts levels."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        image_key, noise_key = jax.random.split(key)
        images = random_images(batch, SIDE, COLOURS, classes=1)(image_key)["images"]
        noise = jax.random.normal(noise_key, images.shape)
        return {"images": images + noise, "targets": noise}

    return linen_task(UNet(layers, DTYPES[dtype], remat), ("images",), squared_error, draw)
