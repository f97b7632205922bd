"""The five small trainings of `python -m benchmarks accuracy`: data, model, optimizer, size.

All of them train on a part of their data for a few minutes at most: enough to see what a gradient's
error does to accuracy, not to reach the accuracy that the models are known for.
"""

import dataclasses
import functools
import platform
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import data
from benchmarks.models.graph import GCN, digits_graph, masked_cross_entropy
from benchmarks.models.graph_attention import GAT
from benchmarks.models.resnet20 import ResNet20
from benchmarks.models.task import cross_entropy
from benchmarks.models.text import CharacterTransformer
from benchmarks.models.vit import ViT

F32 = jnp.dtype(jnp.float32)

type Arrays = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A model that is trained on something, and how well it does then.

    Attributes:
        description: One line for the table.
        module: Builds the model, for training or for evaluation.
        inputs: The entries of a batch that it is called with.
        load: Takes a seed; returns all arrays that training and evaluation read.
        pick: Takes the arrays, numbers of examples, and whether they are test examples; returns a
            batch. It is traced.
        objective: Takes scores and batch, returns the loss.
        right: Takes scores and batch, returns the share of right answers.
        examples: How many training examples there are, and test examples.
        batch: How many of them are in a batch.
        steps: Training steps.
        optimizer: Takes the number of steps.
        images: Whether the model has feature maps, which pooled codecs are for.
        sequences: Whether it has tokens, which can be pooled, too.
        settings: What else decides about the result; together with the numbers above it tells
            results that can be compared from those that cannot.
    """

    description: str
    module: Callable[[bool], nn.Module]
    inputs: tuple[str, ...]
    load: Callable[[int], Arrays]
    pick: Callable[[Arrays, jax.Array, bool], dict[str, jax.Array]]
    objective: Callable[[jax.Array, Any], jax.Array]
    right: Callable[[jax.Array, Any], jax.Array]
    examples: tuple[int, int]
    batch: int
    steps: int
    optimizer: Callable[[int], optax.GradientTransformation]
    images: bool = False
    sequences: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What has to be equal for two results to belong into one table."""
        train, test = self.examples
        sizes = {"train": train, "test": test, "batch": self.batch, "steps": self.steps}
        return sizes | self.settings

    def init(self, seed: int, arrays: Arrays) -> tuple[Any, Any]:
        """Returns freshly initialised `(params, state)`."""
        example = self.pick(arrays, jnp.arange(self.batch), False)
        inputs = (example[name] for name in self.inputs)
        variables = dict(jax.jit(self.module(True).init)(jax.random.key(seed), *inputs))
        return variables.pop("params"), variables

    def loss(
        self, params: Any, state: Any, arrays: Arrays, picked: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Returns the loss of the picked training examples, and the new state."""
        batch = self.pick(arrays, picked, False)
        inputs = (batch[name] for name in self.inputs)
        scores, state = self.module(True).apply(
            {"params": params, **state}, *inputs, mutable=list(state)
        )
        return self.objective(scores, batch), state

    def score(self, params: Any, state: Any, arrays: Arrays, picked: jax.Array) -> jax.Array:
        """Returns the share of right answers among the picked test examples."""
        batch = self.pick(arrays, picked, True)
        inputs = (batch[name] for name in self.inputs)
        return self.right(self.module(False).apply({"params": params, **state}, *inputs), batch)

    def batches(self, seed: int) -> Iterator[np.ndarray]:
        """Yields the numbers of the examples of each training step."""
        random = np.random.default_rng(seed)
        train, _ = self.examples
        order = np.empty(0, np.int32)
        for _ in range(self.steps):
            if len(order) < self.batch:
                order = random.permutation(train).astype(np.int32)
            chosen, order = order[: self.batch], order[self.batch :]
            yield chosen

    def test_batches(self, size: int = 500) -> Iterator[np.ndarray]:
        """Yields the numbers of all test examples, in equal parts."""
        _, test = self.examples
        yield from np.arange(test, dtype=np.int32).reshape(-1, min(size, test))


def share_right(scores: jax.Array, batch: Any) -> jax.Array:
    """The share of examples whose label has the highest score."""
    return jnp.mean(scores.argmax(-1) == batch["labels"])


# Images.

TRAIN_IMAGES, TEST_IMAGES = 10_000, 5_000


def load_images(halve: bool, seed: int) -> Arrays:
    """The first images of Fashion-MNIST, which come in random order; the same for every seed."""
    del seed
    parts = data.fashion_mnist()
    sizes = {"train": TRAIN_IMAGES, "test": TEST_IMAGES}
    arrays = {}
    for part, size in sizes.items():
        images, labels = parts[part]
        images = images[:size]
        arrays[part] = {
            "images": jnp.asarray(data.halved(images) if halve else images),
            "labels": jnp.asarray(labels[:size]),
        }
    return arrays


def pick_rows(arrays: Arrays, picked: jax.Array, test: bool) -> dict[str, jax.Array]:
    """The rows of the training or of the test arrays."""
    return {name: array[picked] for name, array in arrays["test" if test else "train"].items()}


def momentum(steps: int) -> optax.GradientTransformation:
    """SGD with momentum, weight decay and a cosine schedule, as residual networks are trained."""
    return optax.chain(
        optax.add_decayed_weights(5e-4), optax.sgd(optax.cosine_decay_schedule(0.1, steps), 0.9)
    )


def image_experiment(*, halve: bool, **own: Any) -> Experiment:
    """A model on Fashion-MNIST, as it is or at half its size; `own` is what is the model's."""
    return Experiment(
        inputs=("images",),
        load=functools.partial(load_images, halve),
        pick=pick_rows,
        objective=cross_entropy,
        right=share_right,
        examples=(TRAIN_IMAGES, TEST_IMAGES),
        batch=64,
        images=True,
        **own,
    )


# Text.

WINDOW, TEST_CHARACTERS = 64, 64 * 500


def load_text(seed: int) -> Arrays:
    """Python's help; the last part of it is for testing. The same for every seed."""
    del seed
    text = data.help_text()
    return {"train": jnp.asarray(text[:-TEST_CHARACTERS]), "test": jnp.asarray(text)}


def pick_windows(arrays: Arrays, picked: jax.Array, test: bool) -> dict[str, jax.Array]:
    """Windows of text, and the characters that follow each of theirs.

    Training windows begin anywhere. Those of the test follow each other.
    """
    text = arrays["test" if test else "train"]
    if test:
        picked = len(text) - TEST_CHARACTERS - 1 + WINDOW * picked
    window = text[picked[:, None] + jnp.arange(WINDOW + 1, dtype=picked.dtype)]
    return {"tokens": window[:, :-1], "labels": window[:, 1:]}


def warm_adam(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with a short warm-up and a cosine schedule, as transformers are trained."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))


# Graphs.

NODES = 1797


def load_graph(seed: int) -> Arrays:
    """The digits' graph, with a tenth of the labels to be seen: another tenth for each seed."""
    seen = np.random.default_rng(seed).random(NODES) < 0.1
    return jax.tree.map(jnp.asarray, digits_graph(NODES) | {"train_mask": seen})


def pick_graph(arrays: Arrays, picked: jax.Array, test: bool) -> dict[str, jax.Array]:
    """The whole graph, which is one example."""
    del picked, test
    return arrays


def share_right_unseen(scores: jax.Array, batch: Any) -> jax.Array:
    """The share of right answers among the nodes whose labels training does not see."""
    return jnp.mean(scores.argmax(-1) == batch["labels"], where=~batch["train_mask"])


def graph_experiment(description: str, model: type[nn.Module], *inputs: str) -> Experiment:
    """Two layers on the whole graph, 200 steps of Adam (Kipf & Welling, 2017, section 5.2)."""
    return Experiment(
        description=description,
        module=lambda train: model(layers=2, dtype=F32, remat=False),
        inputs=("features", "senders", "receivers", *inputs),
        load=load_graph,
        pick=pick_graph,
        objective=masked_cross_entropy,
        right=share_right_unseen,
        examples=(1, 1),
        batch=1,
        steps=200,
        optimizer=lambda steps: optax.adamw(0.01, weight_decay=5e-4),
    )


EXPERIMENTS: dict[str, Experiment] = {
    "graph_gcn": graph_experiment("GCN, 2 layers, digits' graph", GCN, "weights"),
    "graph_gat": graph_experiment("GAT, 2 layers, digits' graph", GAT),
    "text_transformer": Experiment(
        description="causal transformer, 2 layers of width 64, Python's help, per character",
        module=lambda train: CharacterTransformer(2, F32),
        inputs=("tokens",),
        load=load_text,
        pick=pick_windows,
        objective=cross_entropy,
        right=share_right,
        examples=(len(data.help_text()) - TEST_CHARACTERS - WINDOW, TEST_CHARACTERS // WINDOW),
        batch=16,
        steps=400,
        optimizer=functools.partial(warm_adam, 3e-3),
        sequences=True,
        settings={"python": ".".join(platform.python_version_tuple()[:2])},
    ),
    "fashion_vit": image_experiment(
        description="ViT, 4 layers of width 64, patches of 7 x 7, Fashion-MNIST",
        module=lambda train: ViT(4, F32, False, patch=7, width=64, heads=4, classes=10),
        halve=False,
        steps=300,
        optimizer=functools.partial(warm_adam, 2e-3),
        sequences=True,
    ),
    "fashion_resnet20": image_experiment(
        description="ResNet-20, Fashion-MNIST at 14 x 14",
        module=lambda train: ResNet20(9, F32, False, train),
        halve=True,
        steps=240,
        optimizer=momentum,
    ),
}
