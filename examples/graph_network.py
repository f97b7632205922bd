"""A deep graph network that tells handwritten digits apart by their neighbours.

    python examples/graph_network.py --policy int4

The nodes are scikit-learn's 1,797 digits, each with edges from the eight most similar ones. A
tenth of them have labels to learn from. The network is a stack of residual layers that average over
neighbours (Kipf and Welling, 2017; residual as in Li et al., "DeeperGCN", 2020). It is written in
plain JAX: the parameters are a pytree, and a layer is a function.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

import jact

LAYERS, WIDTH, CLASSES, NEIGHBOURS = 16, 128, 10, 8


# The model.


def init(key: jax.Array, features: int) -> dict[str, Any]:
    """Returns the parameters."""
    keys = iter(jax.random.split(key, 2 * LAYERS + 2))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * (2 / rows) ** 0.5

    layers = [
        {
            "own": matrix(WIDTH, WIDTH),
            "neighbours": matrix(WIDTH, WIDTH),
            "scale": jnp.ones(WIDTH),
            "bias": jnp.zeros(WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"in": matrix(features, WIDTH), "layers": layers, "out": matrix(WIDTH, CLASSES)}


def layer(params: dict[str, jax.Array], x: jax.Array, edges: tuple[jax.Array, jax.Array]) -> Any:
    """Adds to each node what it and its neighbours say."""
    sources, targets = edges
    h = x - x.mean(-1, keepdims=True)
    h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
    h = jax.nn.gelu(h * params["scale"][None] + params["bias"][None])
    mean = jax.ops.segment_sum(h[sources], targets, num_segments=len(x)) / NEIGHBOURS
    return x + 0.3 * (h @ params["own"] + mean @ params["neighbours"])


def network(params: dict[str, Any], nodes: jax.Array, edges: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the logits of all nodes, `[nodes, classes]`."""
    x = nodes @ params["in"]
    for weights in params["layers"]:
        x = layer(weights, x, edges)
    return jax.nn.gelu(x) @ params["out"]


# The data.


def load_graph() -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array, np.ndarray]:
    """Returns the nodes, the edges as (sources, targets), the labels, and who has a label."""
    pixels, labels = load_digits(return_X_y=True)
    graph = kneighbors_graph(pixels, NEIGHBOURS).tocoo()
    labelled = np.random.default_rng(0).random(len(labels)) < 0.1
    edges = jnp.asarray(graph.col, jnp.int32), jnp.asarray(graph.row, jnp.int32)
    return jnp.asarray(pixels / 16, jnp.float32), edges, jnp.asarray(labels, jnp.int32), labelled


# The training.


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains under the policy and in plain JAX, and compares."""
    options = training.parse(__doc__, arguments, steps=60)
    nodes, edges, labels, labelled = load_graph()
    optimizer = optax.adam(optax.linear_schedule(0.0, 1e-3, 10))

    def loss_fn(params: Any, chosen: jax.Array) -> jax.Array:
        logits = network(params, nodes, edges)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses * chosen) / jnp.sum(chosen)

    def make_step(policy: str) -> Any:
        # This is all that jact asks for.
        gradient = jact.value_and_grad(loss_fn, policy=policy)

        def step(state: Any, chosen: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = state
            loss, grads = gradient(params, chosen)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.jit(step, donate_argnums=0)

    def start() -> Any:
        params = init(jax.random.key(0), nodes.shape[-1])
        return params, optimizer.init(params)

    def batch(number: int) -> jax.Array:
        # Each step sees a random half of the labels.
        chosen = labelled & (np.random.default_rng(number).random(len(labelled)) < 0.5)
        return jnp.asarray(chosen, jnp.float32)

    @jax.jit
    def right(params: Any) -> jax.Array:
        return network(params, nodes, edges).argmax(-1) == labels

    def evaluate(state: Any) -> dict[str, float]:
        return {"test accuracy": float(np.asarray(right(state[0]))[~labelled].mean())}

    training.run(
        training.Task(
            title=f"{LAYERS} graph layers on {len(nodes)} digits",
            init=start,
            make_step=make_step,
            batch=batch,
            evaluate=evaluate,
        ),
        options,
    )


if __name__ == "__main__":
    main()
