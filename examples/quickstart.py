"""The same network trained four times from the same seed: plain, rematerialised, 4 bits, 2 bits.

    python examples/quickstart.py

The network is a ResNet-20 (He et al., 2016, section 4.2), the data scikit-learn's 1,797 handwritten
digits. The script prints a table, and draws the losses and the memory in `quickstart.png`.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jact

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker  # noqa: E402

BATCH, SIDE, MIB = 128, 32, 2**20


# The model: ordinary Flax, nothing in it knows of jact.


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    channels: int
    stride: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, self.channels, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9)
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm()(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet20(nn.Module):
    """Three stages of three blocks, of 16, 32 and 64 channels, over images `[batch, 32, 32, 1]`."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        block = nn.remat(Block) if self.remat else Block
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for i, channels in enumerate((16, 16, 16, 32, 32, 32, 64, 64, 64)):
            stride = 2 if i in (3, 6) else 1
            x = block(channels, stride, train, name=f"Block_{i}")(x)
        return nn.Dense(10)(x.mean((1, 2)))


def loss_fn(params: Any, state: Any, batch: Any, model: nn.Module) -> tuple[jax.Array, Any]:
    """Returns the mean cross-entropy and the new running statistics."""
    images, labels = batch
    logits, state = model.apply({"params": params, **state}, images, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


# The four runs. This is all that jact asks for: jact.value_and_grad in the place of JAX's.

plain_loss = functools.partial(loss_fn, model=ResNet20())
remat_loss = functools.partial(loss_fn, model=ResNet20(remat=True))

GRADIENTS = {
    "plain": jax.value_and_grad(plain_loss, has_aux=True),
    "remat": jax.value_and_grad(remat_loss, has_aux=True),
    "int4": jact.value_and_grad(plain_loss, has_aux=True, policy="int4"),
    "int2": jact.value_and_grad(plain_loss, has_aux=True, policy="int2"),
}


def make_step(gradient: Callable[..., Any], optimizer: optax.GradientTransformation) -> Any:
    """Returns a jitted training step: `(train_state, batch) -> (train_state, loss)`."""

    @jax.jit
    def step(train_state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state, opt_state = train_state
        (loss, state), grads = gradient(params, state, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), loss

    return step


# Data, training, evaluation.


def load_data() -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the train and test digits, as images `[n, 32, 32, 1]` and labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = jnp.asarray(pixels.reshape(-1, 8, 8, 1) / 16 - 0.3, jnp.float32)
    images = jax.image.resize(images, (len(images), SIDE, SIDE, 1), "linear")
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    labels = jnp.asarray(labels, jnp.int32)
    return (images[train], labels[train]), (images[test], labels[test])


def batches(data: tuple[jax.Array, jax.Array], steps: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields `steps` batches, reshuffling the data for every epoch."""
    images, labels = data
    random = np.random.default_rng(0)
    order = np.array([], int)
    for _ in range(steps):
        if len(order) < BATCH:
            order = random.permutation(len(labels))
        chosen, order = order[:BATCH], order[BATCH:]
        yield images[chosen], labels[chosen]


def accuracy(train_state: Any, data: tuple[jax.Array, jax.Array]) -> float:
    """Returns the share of right answers, with BatchNorm's running statistics."""
    params, state, _ = train_state
    images, labels = data
    logits = jax.jit(lambda v, x: ResNet20().apply(v, x, train=False))(
        {"params": params, **state}, images
    )
    return float((logits.argmax(-1) == labels).mean())


def train(steps: int, console: rich.console.Console) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Trains the four runs side by side, step by step, so that their times are comparable.

    Returns:
        One row of figures per run, and each run's losses.
    """
    train_data, test_data = load_data()
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps))
    state = jax.jit(ResNet20().init)(jax.random.key(0), train_data[0][:1])
    params = state.pop("params")
    start = (params, state, optimizer.init(params))
    states = dict.fromkeys(GRADIENTS, start)
    losses: dict[str, list[float]] = {run: [] for run in GRADIENTS}
    seconds: dict[str, list[float]] = {run: [] for run in GRADIENTS}

    compiled, compile_seconds = {}, {}
    example = next(batches(train_data, 1))
    for run, gradient in GRADIENTS.items():
        console.print(f"compiling {run}")
        begin = time.perf_counter()
        compiled[run] = make_step(gradient, optimizer).lower(start, example).compile()
        compile_seconds[run] = time.perf_counter() - begin

    columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[losses]}")
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, losses="")
        for batch in batches(train_data, steps):
            for run, step in compiled.items():
                begin = time.perf_counter()
                states[run], loss = jax.block_until_ready(step(states[run], batch))
                seconds[run].append(time.perf_counter() - begin)
                losses[run].append(float(loss))
            latest = "  ".join(f"{run} {values[-1]:.3f}" for run, values in losses.items())
            progress.update(task, advance=1, losses=latest)

    rows = [
        {
            "run": run,
            "accuracy": accuracy(states[run], test_data),
            "peak_bytes": compiled[run].memory_analysis().temp_size_in_bytes,
            "saved_bytes": saved_bytes(run, params, state, example),
            "step_ratio": statistics.median(
                own / plain for own, plain in zip(seconds[run], seconds["plain"], strict=True)
            ),
            "compile_seconds": compile_seconds[run],
        }
        for run in GRADIENTS
    ]
    return rows, losses


def saved_bytes(run: str, *arguments: Any) -> int:
    """Returns the bytes that a run keeps from its forward pass for its backward pass."""
    loss = remat_loss if run == "remat" else plain_loss
    policy = run if run.startswith("int") else "off"
    return jact.report(lambda *args: loss(*args)[0], policy)(*arguments).saved_bytes


# The table and the picture.


def make_table(rows: list[dict[str, Any]]) -> rich.table.Table:
    """Returns the figures as a table."""
    table = rich.table.Table(
        title="ResNet-20 on digits, batch 128",
        caption="Peak: the most temporary memory XLA plans for one training step. Saved: what the "
        "backward pass keeps, before XLA fuses and frees. Step time: median, relative to plain.",
    )
    table.add_column("run")
    for heading in ("test accuracy", "peak MiB", "saved MiB", "step time", "compile s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["run"],
            f"{row['accuracy']:.3f}",
            f"{row['peak_bytes'] / MIB:.0f}",
            f"{row['saved_bytes'] / MIB:.1f}",
            f"{row['step_ratio']:.2f} x",
            f"{row['compile_seconds']:.1f}",
        )
    return table


def draw(rows: list[dict[str, Any]], losses: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the loss curves and the compiled peaks."""
    colors = dict(zip(losses, ("#b8bfc7", "#4c4c4c", "#2a7de1", "#e8743b"), strict=True))
    # The curves lie on one another, so each is drawn thinner than the one below.
    widths = dict(zip(losses, (5.0, 3.0, 1.8, 1.0), strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run, values in losses.items():
        left.plot(values, color=colors[run], label=run, linewidth=widths[run])
    left.set(xlabel="step", ylabel="training loss", title="Same seed, same data", yscale="log")
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(ticker.NullFormatter())
    left.legend(frameon=False)
    peaks = [row["peak_bytes"] / MIB for row in rows]
    bars = right.bar(list(losses), peaks, color=list(colors.values()), width=0.65)
    right.bar_label(bars, [f"{peak:.0f}" for peak in peaks], padding=3)
    right.set(ylabel="MiB", title="Compiled peak memory of one training step")
    right.margins(y=0.12)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains, prints the table, writes the picture and, if asked to, the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--picture",
        type=pathlib.Path,
        default=pathlib.Path("quickstart.png"),
        metavar="FILE",
        help="draw the curves and the peaks here (quickstart.png)",
    )
    options = parser.parse_args()
    console = rich.console.Console()
    rows, losses = train(options.steps, console)
    console.print(make_table(rows))
    draw(rows, losses, options.picture)
    console.print(f"The curves and the peaks are in {options.picture.absolute()}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
