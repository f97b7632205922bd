"""A transformer that learns to write Python's own help texts, character by character.

    python examples/language_model.py --policy int4

The text is `pydoc_data.topics`, half a million characters that come with Python. The network is a
decoder with pre-normalisation (Radford et al., 2019, section 2.3) in Flax Linen.
"""

import pydoc_data.topics
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training

import jact

LAYERS, WIDTH, HEADS = 4, 128, 4
BATCH, LENGTH = 16, 128


# The model: ordinary Flax, nothing in it knows of jact.


class Block(nn.Module):
    """Attention to what came before, and a hidden layer."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(HEADS, name="attention")(h, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=not train)(h)
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        h = nn.Dense(WIDTH, name="down")(h)
        return x + nn.Dropout(0.1, deterministic=not train)(h)


class Transformer(nn.Module):
    """Logits of the next character, `[batch, length, characters]`, for characters by number."""

    characters: int

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        places = self.param("places", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(self.characters, WIDTH)(tokens) + places[None]
        mask = nn.make_causal_mask(tokens)
        for i in range(LAYERS):
            x = Block(name=f"Block_{i}")(x, mask, train)
        return nn.Dense(self.characters, name="head")(nn.LayerNorm()(x))


# The data.


def load_text() -> tuple[np.ndarray, int]:
    """Returns the text as numbers, and how many different characters there are."""
    text = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    alphabet, tokens = np.unique(list(text), return_inverse=True)
    return tokens.astype(np.int32), len(alphabet)


def windows(text: np.ndarray, seed: int, number: int) -> jax.Array:
    """Returns windows from random places, `[number, LENGTH + 1]`."""
    starts = np.random.default_rng(seed).integers(len(text) - LENGTH, size=number)
    return jnp.asarray(text[starts[:, None] + np.arange(LENGTH + 1)])


# The training.


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains under the policy and in plain JAX, and compares."""
    options = training.parse(__doc__, arguments, steps=80)
    text, characters = load_text()
    train_text, test_text = np.split(text, [len(text) * 9 // 10])
    model = Transformer(characters)
    schedule = optax.linear_schedule(0.0, 2e-3, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def loss_fn(params: Any, tokens: jax.Array, key: jax.Array, train: bool = True) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1], train, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def make_step(policy: str) -> Any:
        # This is all that jact asks for.
        gradient = jact.value_and_grad(loss_fn, policy=policy)

        def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state, number = state
            loss, grads = gradient(params, tokens, jax.random.key(number))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state, number + 1), loss

        return jax.jit(step, donate_argnums=0)

    def start() -> Any:
        tokens = windows(train_text, 0, 1)[:, :-1]
        params = jax.jit(model.init, static_argnums=2)(jax.random.key(0), tokens, False)["params"]
        return params, optimizer.init(params), jnp.zeros((), jnp.uint32)

    test_loss = jax.jit(lambda params, tokens: loss_fn(params, tokens, jax.random.key(0), False))

    def evaluate(state: Any) -> dict[str, float]:
        loss = np.mean([test_loss(state[0], windows(test_text, i, BATCH)) for i in range(8)])
        return {"bits per character": float(loss / np.log(2))}

    training.run(
        training.Task(
            title=f"{LAYERS}-layer transformer, batch {BATCH} x {LENGTH}",
            init=start,
            make_step=make_step,
            batch=lambda number: windows(train_text, number, BATCH),
            evaluate=evaluate,
        ),
        options,
    )


if __name__ == "__main__":
    main()
