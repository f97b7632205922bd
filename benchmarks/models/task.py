"""What every model of the table comes down to: initialisation, one loss and one batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, Concatenate

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

#: Whether `nn.remat` wraps each block of a model, or what wraps it instead.
type Wrap = bool | Callable[[type[nn.Module]], type[nn.Module]]

DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Task:
    """A model at one size, ready to be differentiated.

    Attributes:
        init: Takes a key, returns `(params, state)`. The parameters are float32 whatever the
            compute dtype is; the state holds the other Flax collections (`batch_stats`), if any.
        loss: Takes `(params, state, batch)`, returns `(scalar, new_state)`, so it is differentiated
            with `has_aux=True`.
        batch: Takes a key, returns one batch as a dict of arrays.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    batch: Callable[[jax.Array], Any]

    def arguments(self, seed: int = 0) -> tuple[Any, Any, Any]:
        """Returns `(params, state, batch)`, the arguments of `loss`, drawn from `seed`."""
        init_key, batch_key = jax.random.split(jax.random.key(seed))
        return *self.init(init_key), self.batch(batch_key)

    def abstract(self) -> tuple[Any, Any, Any]:
        """Returns the shapes and dtypes of `arguments()`; nothing is allocated."""
        return jax.eval_shape(self.arguments)


def linen_task(
    module: nn.Module,
    inputs: tuple[str, ...],
    objective: Callable[[jax.Array, Any], jax.Array],
    batch: Callable[[jax.Array], Any],
    rngs: tuple[str, ...] = (),
) -> Task:
    """Makes a task of a Flax Linen module.

    Args:
        module: The model. It is always run in training mode.
        inputs: The entries of the batch that the module is called with, in order.
        objective: Takes the module's output and the batch, returns the scalar loss.
        batch: Draws a batch from a key.
        rngs: The entries of the batch that are keys, each for the Flax stream of the same name.

    Returns:
        The task.
    """

    def keys(batch: Any) -> dict[str, jax.Array]:
        return {name: batch[name] for name in rngs}

    # Under jit, XLA drops the forward pass that Flax runs to learn the parameters' shapes.
    @jax.jit
    def init(key: jax.Array) -> tuple[Any, Any]:
        example = batch(key)
        variables = module.init(
            {"params": key, **keys(example)}, *(example[name] for name in inputs)
        )
        params = variables.pop("params")
        return params, variables

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, **state}
        arguments = (batch[name] for name in inputs)
        output, new_state = module.apply(
            variables, *arguments, rngs=keys(batch), mutable=list(state)
        )
        return objective(output, batch), new_state

    return Task(init, loss, batch)


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    """Returns the mean cross-entropy, in float32, of `[batch, classes]` logits."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def squared_error(output: jax.Array, batch: Any) -> jax.Array:
    """Returns the mean squared error, in float32, against the batch's targets."""
    return jnp.mean((output.astype(jnp.float32) - batch["targets"]) ** 2)


def random_images(
    size: int, side: int, channels: int, classes: int
) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Returns a function that draws normalised images with labels: `[size, side, side, channels]`.

    Neighbouring pixels are correlated, as in photographs: white noise would flatter or hurt codecs
    that share a range between neighbours.
    """

    def batch(key: jax.Array) -> dict[str, jax.Array]:
        coarse_key, fine_key, label_key = jax.random.split(key, 3)
        coarse = jax.random.normal(coarse_key, (size, side // 4, side // 4, channels))
        smooth = jax.image.resize(coarse, (size, side, side, channels), "linear")
        fine = jax.random.normal(fine_key, smooth.shape)
        labels = jax.random.randint(label_key, (size,), 0, classes)
        return {"images": smooth + 0.3 * fine, "labels": labels}

    return batch


def maybe_remat(block: type[nn.Module], remat: Wrap) -> type[nn.Module]:
    """Returns `block`, wrapped in `nn.remat` (it keeps its input alone) if `remat` is set.

    Give the instance an explicit name: Flax would name a wrapped class differently, and the two
    models could not share parameters.
    """
    if callable(remat):
        return remat(block)
    return nn.remat(block) if remat else block


def maybe_wrap[**P](
    function: Callable[Concatenate[nn.Module, P], jax.Array], remat: Wrap
) -> Callable[Concatenate[nn.Module, P], jax.Array]:
    """Returns a function of a module, wrapped as the blocks are, but never in `nn.remat`."""
    return remat(function) if callable(remat) else function  # type: ignore[arg-type, return-value]
