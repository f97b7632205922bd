"""The quickstart's network, trained in less memory than 8 bits need, with bits that follow.

    python examples/adaptive.py

Two runs from the same seed: plain, and with a controller whose budget is the compiled peak of the
whole training step, halfway between what 2 and 8 bits for every residual need. The script prints a
table and what the controller did, and draws the bits of each layer over time in `adaptive.png`.
"""

import argparse
import json
import pathlib
import time
from typing import Any

import jax
import matplotlib
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table
from quickstart import MIB, ResNet20, accuracy, batches, load_data, make_step, plain_loss

import jact
import jact.memory

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import BoundaryNorm, ListedColormap  # noqa: E402

#: What each codec is drawn as: its bits, and a colour.
SHADES = {
    "int2": "#c8452b",
    "int3": "#e8743b",
    "int4": "#f2c14e",
    "int5": "#a9cfe8",
    "int6": "#5ba3d9",
    "int8": "#2a62b1",
    "keep": "#1b2a41",
}


def adaptive_step(optimizer: optax.GradientTransformation, controller: jact.Controller) -> Any:
    """Returns the quickstart's training step, with a controller as the policy."""
    gradient = jact.value_and_grad(plain_loss, has_aux=True, policy=controller)

    # This is all that adaptation asks for: controller.jit in the place of jax.jit.
    @controller.jit
    def step(train_state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state, opt_state = train_state
        (loss, state), grads = gradient(params, state, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), loss

    return step


def train(options: argparse.Namespace, console: rich.console.Console) -> dict[str, Any]:
    """Trains both runs side by side, and returns what is shown of them."""
    train_data, test_data = load_data()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, options.steps // 10, options.steps)
    optimizer = optax.adam(schedule)
    state = jax.jit(ResNet20().init)(jax.random.key(0), train_data[0][:1])
    params = state.pop("params")
    start = (params, state, optimizer.init(params))
    example = next(batches(train_data, 1))

    peaks = {}
    for policy in ("off", "int8", "int2"):
        console.print(f"compiling the step with policy {policy} for its peak")
        gradient = jact.value_and_grad(plain_loss, has_aux=True, policy=policy)
        step = make_step(gradient, optimizer)
        peaks[policy] = jact.memory.peak(step, start, example)
        if policy == "off":
            plain = step
    budget = (peaks["int2"] + peaks["int8"]) // 2
    console.print(f"the budget is {budget / MIB:.1f} MiB")

    controller = jact.Controller(memory=budget, every=options.every, min_gain=0.02)
    steps = {"plain": plain, "adaptive": adaptive_step(optimizer, controller)}
    states = dict.fromkeys(steps, start)
    losses: dict[str, list[float]] = {run: [] for run in steps}
    plans = []
    columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[losses]}")
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.steps, losses="")
        for batch in batches(train_data, options.steps):
            for run, step in steps.items():
                states[run], loss = step(states[run], batch)
                losses[run].append(float(loss))
            plans.append(controller.plan)
            latest = "  ".join(f"{run} {values[-1]:.3f}" for run, values in losses.items())
            progress.update(task, advance=1, losses=latest)
    return {
        "accuracy": {run: accuracy(states[run], test_data) for run in steps},
        "losses": losses,
        "peaks": peaks | {"adaptive": jact.memory.peak(steps["adaptive"], start, example)},
        "budget": budget,
        "plans": plans,
        "controller": controller,
    }


def make_table(result: dict[str, Any]) -> rich.table.Table:
    """Returns the figures as a table."""
    table = rich.table.Table(title="ResNet-20 on digits, batch 128")
    for heading in ("", "peak MiB", "test accuracy"):
        table.add_column(heading, justify="right" if heading else "left")
    peaks, accuracies = result["peaks"], result["accuracy"]
    table.add_row("plain", f"{peaks['off'] / MIB:.1f}", f"{accuracies['plain']:.3f}")
    table.add_row("8 bits", f"{peaks['int8'] / MIB:.1f}", "")
    table.add_row("the budget", f"{result['budget'] / MIB:.1f}", "")
    table.add_row("adaptive", f"{peaks['adaptive'] / MIB:.1f}", f"{accuracies['adaptive']:.3f}")
    table.add_row("2 bits", f"{peaks['int2'] / MIB:.1f}", "")
    return table


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the bits of each residual over the steps, and the losses."""
    names = list(result["plans"][0].codecs)
    order = list(SHADES)
    picture = np.array([[order.index(plan.bits[n]) for plan in result["plans"]] for n in names])
    figure, (bits, losses) = plt.subplots(
        2,
        1,
        figsize=(10, 2.6 + 0.17 * len(names)),
        layout="constrained",
        height_ratios=(0.17 * len(names), 2),
        sharex=True,
    )
    bits.imshow(
        picture,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(list(SHADES.values())),
        norm=BoundaryNorm(np.arange(len(SHADES) + 1) - 0.5, len(SHADES)),
        extent=(0, picture.shape[1], len(names) - 0.5, -0.5),
    )
    short = [n.removeprefix("ResNet20/").replace("conv_general_dilated", "conv") for n in names]
    bits.set_yticks(range(len(names)), short, fontsize=7)
    bits.tick_params(axis="y", length=0)
    used = [plt.Rectangle((0, 0), 1, 1, color=color) for color in SHADES.values()]
    bits.legend(
        used,
        ["2 bits", "3", "4", "5", "6", "8", "exact"],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(SHADES),
        frameon=False,
        borderaxespad=0.2,
    )
    bits.set_title("What each residual is stored in", loc="right")
    for adaptation in result["controller"].history:
        losses.axvline(adaptation.step, color="#b8bfc7", linewidth=1)
    losses.plot(result["losses"]["plain"], color="#4c4c4c", linewidth=2.5, label="plain")
    losses.plot(result["losses"]["adaptive"], color="#e8743b", linewidth=1.2, label="adaptive")
    losses.set(xlabel="step (lines: the controller measures)", ylabel="training loss", yscale="log")
    losses.legend(frameon=False, loc="upper right")
    losses.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains, prints the table and the report, and draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--every", type=int, default=15, help="steps between adaptations")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--picture",
        type=pathlib.Path,
        default=pathlib.Path("adaptive.png"),
        metavar="FILE",
        help="draw the bits over time here (adaptive.png)",
    )
    options = parser.parse_args()
    console = rich.console.Console()
    begin = time.perf_counter()
    result = train(options, console)
    console.print(make_table(result))
    console.print(result["controller"].report(), highlight=False, soft_wrap=True)
    draw(result, options.picture)
    if options.json:
        figures = {k: result[k] for k in ("accuracy", "losses", "peaks", "budget")}
        figures["history"] = [a.to_json() for a in result["controller"].history]
        figures["seconds"] = time.perf_counter() - begin
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
