"""A residual network that tells images apart: clothes where there are some, else digits.

    python examples/image_classification.py --policy int4

The images are Fashion-MNIST where Debian's package `dataset-fashion-mnist` is installed, and else
scikit-learn's 1,797 digits. The network has three stages of pre-activation blocks (He et al.,
"Identity Mappings in Deep Residual Networks", 2016) in Flax NNX, with BatchNorm.
"""

import gzip
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from flax import nnx
from sklearn.datasets import load_digits

import jact

FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
CHANNELS = (16, 32, 64)
BATCH = 64


# The model: ordinary Flax, nothing in it knows of jact.


def conv3x3(inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(inputs, outputs, (3, 3), strides=stride, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    """Two normalised 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (
            nnx.BatchNorm(n, momentum=0.9, rngs=rngs) for n in (inputs, outputs)
        )
        self.conv1 = conv3x3(inputs, outputs, stride, rngs)
        self.conv2 = conv3x3(outputs, outputs, 1, rngs)
        self.widens = inputs != outputs
        if self.widens:
            self.shortcut = nnx.Conv(inputs, outputs, (1, 1), strides=stride, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norm1(x))
        shortcut = self.shortcut(h) if self.widens else x
        h = self.conv2(nnx.relu(self.norm2(self.conv1(h))))
        return shortcut + h


class ResNet(nnx.Module):
    """Logits of ten classes for images `[batch, height, width, 1]`."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = conv3x3(1, CHANNELS[0], 1, rngs)
        inputs = [CHANNELS[0], *CHANNELS[:-1]]
        self.blocks = nnx.List()
        for i, (n, m) in enumerate(zip(inputs, CHANNELS, strict=True)):
            self.blocks.append(Block(n, m, 2 if i else 1, rngs))
            self.blocks.append(Block(m, m, 1, rngs))
        self.norm = nnx.BatchNorm(CHANNELS[-1], momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(CHANNELS[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.relu(self.norm(x)).mean((1, 2)))


# The data.

type Data = tuple[np.ndarray, np.ndarray]


def load_data() -> tuple[str, Data, Data]:
    """Returns what the images are of, and images and labels to train on and to test with."""
    if FASHION.is_dir():
        return "Fashion-MNIST", read_fashion("train"), read_fashion("t10k", 2000)
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).repeat(4, 1).repeat(4, 2).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return "digits", (images[train], labels[train]), (images[test], labels[test])


def read_fashion(part: str, most: int | None = None) -> Data:
    """Reads images `[n, 28, 28, 1]` and labels from IDX files."""
    images = gzip.decompress((FASHION / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((FASHION / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    pixels = np.frombuffer(images, np.uint8).reshape(-1, 28, 28, 1)[:most]
    return pixels.astype(np.float32) / 255, np.frombuffer(labels, np.uint8)[:most]


# The training.


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains under the policy and in plain JAX, and compares."""
    options = training.parse(__doc__, arguments, steps=80)
    name, (images, labels), test = load_data()
    schedule = optax.linear_schedule(0.0, 3e-3, 10)

    def create() -> tuple[ResNet, nnx.Optimizer]:
        model = ResNet(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)

    # Checkpoints and jax.jit want arrays: what the modules hold, without the modules.
    graph = nnx.graphdef(nnx.eval_shape(create))

    def loss_fn(model: ResNet, batch: Any) -> jax.Array:
        images, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    def make_step(policy: str) -> Any:
        # This is all that jact asks for.
        gradient = jact.nnx.value_and_grad(loss_fn, policy=policy)

        def step(state: nnx.State, batch: Any) -> tuple[nnx.State, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            loss, grads = gradient(model, batch)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        return jax.jit(step, donate_argnums=0)

    def batch(number: int) -> Any:
        chosen = np.random.default_rng(number).integers(len(labels), size=BATCH)
        return jnp.asarray(images[chosen]), jnp.asarray(labels[chosen], jnp.int32)

    @jax.jit
    def classes(state: nnx.State, images: jax.Array) -> jax.Array:
        model, _ = nnx.merge(graph, state)
        model.eval()
        return model(images).argmax(-1)

    def evaluate(state: nnx.State) -> dict[str, float]:
        return {"test accuracy": float(np.mean(classes(state, test[0]) == test[1]))}

    training.run(
        training.Task(
            title=f"ResNet on {name}, batch {BATCH}",
            init=lambda: nnx.state(nnx.jit(create)()),
            make_step=make_step,
            batch=batch,
            evaluate=evaluate,
        ),
        options,
    )


if __name__ == "__main__":
    main()
