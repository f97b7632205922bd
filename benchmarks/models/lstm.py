"""A stack of LSTMs (Hochreiter and Schmidhuber, 1997) that predicts the next step of a sequence."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models.task import DTYPES, Task, linen_task, maybe_remat, squared_error

FEATURES, WIDTH, LENGTH = 64, 512, 256


class Block(nn.Module):
    """One LSTM, run over the sequence."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rnn: Any = nn.RNN(nn.LSTMCell(WIDTH, dtype=self.dtype))
        return rnn(x)


class LSTM(nn.Module):
    """`layers` LSTMs and a linear output at each step."""

    layers: int
    dtype: jnp.dtype
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = maybe_remat(Block, self.remat)
        for i in range(self.layers):
            x = block(self.dtype, name=f"Block_{i}")(x)
        return nn.Dense(FEATURES, dtype=self.dtype)(x)


def lstm(batch: int, layers: int, dtype: str, remat: bool) -> Task:
    """Builds the network on random walks `[batch, 256, 64]`."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        steps = jax.random.normal(key, (batch, LENGTH + 1, FEATURES))
        walks = jnp.cumsum(steps, axis=1) * LENGTH**-0.5
        return {"sequences": walks[:, :-1], "targets": walks[:, 1:]}

    return linen_task(LSTM(layers, DTYPES[dtype], remat), ("sequences",), squared_error, draw)
