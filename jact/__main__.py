"""The command line: what a step saves, its peak on any device, and the largest batch that fits.

    python -m jact report train:loss_and_args --policy int2
    python -m jact peak train:step_and_args --target h100
    python -m jact max-batch train:make_step --memory "16 GiB" --policies off,int4

The function that is named returns `(fn, args)`: what is asked about, and the tuple of its
arguments, arrays or `jax.ShapeDtypeStruct`s. It is called under `jax.eval_shape`, so it may well
make parameters: none is allocated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import rich.console

import jact
from jact import memory, presets
from jact.memory.max_batch import step_and_args
from jact.memory.sizes import format_bytes, parse_bytes
from jact.spelling import must_be_one_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: those of the command line; `sys.argv`'s when None.

    Returns:
        The exit status.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    # Nothing is run here, so JAX need not look for a device, nor warn that there is none.
    if getattr(chosen, "target", None) and jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", "cpu")
    try:
        result, data = chosen.run(chosen)
    except (ImportError, ValueError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if chosen.json:
        print(json.dumps(data, indent=2))
    else:
        rich.console.Console().print(result, markup=False, highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = _add(commands, "report", _report, "what a loss saves for its backward pass")
    named = {"type": _policy, "metavar": "NAME"}
    report.add_argument("--policy", **named, default="int4", help="how it is stored")
    report.add_argument("--against", **named, help="a policy to compare it with")
    report.add_argument("--has-aux", action="store_true", help="the loss returns auxiliary data")
    report.add_argument("--peak", action="store_true", help="compile the gradient for its peak")
    peak = _add(commands, "peak", _peak, "the peak memory of a step")
    peak.add_argument("--target", help=f"the device to compile for: {', '.join(memory.TARGETS)}")
    peak.add_argument("--buffers", action="store_true", help="tell what is live at the peak")
    largest = _add(commands, "max-batch", _max_batch, "the largest batch that fits")
    largest.add_argument("--memory", required=True, help='what the device has, such as "16 GiB"')
    largest.add_argument("--target", help=f"the device to compile for: {', '.join(memory.TARGETS)}")
    largest.add_argument("--policies", default="off,int4", help="comma-separated")
    largest.add_argument("--start", type=int, default=8, help="the first size to compile")
    largest.add_argument("--multiple", type=int, default=1, help="sizes are multiples of it")
    largest.add_argument("--tolerance", type=float, default=0.0, help="0.02 is within 2 %%")
    return parser


def _add(
    commands: Any, name: str, run: Callable[[Any], tuple[Any, Any]], words: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=words, description=f"Prints {words}.")
    takes = "(size, policy)" if name == "max-batch" else "no arguments"
    gives = "(loss, args)" if name == "report" else "(step, args)"
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help=f"takes {takes} and returns {gives}, where args is a tuple",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _policy(name: str) -> str:
    if name not in presets.NAMES:
        raise argparse.ArgumentTypeError(must_be_one_of(name, presets.NAMES))
    return name


def _report(chosen: argparse.Namespace) -> tuple[Any, Any]:
    fun, args = _described(load(chosen.function))
    policies = [chosen.policy] if chosen.against is None else [chosen.policy, chosen.against]
    reports = [
        jact.report(fun, policy, has_aux=chosen.has_aux, peak=chosen.peak)(*args)
        for policy in policies
    ]
    shown = reports[0] if len(reports) == 1 else reports[0].compare(*reports[1:])
    return shown, shown.to_json()


def _peak(chosen: argparse.Namespace) -> tuple[Any, Any]:
    step, args = _described(load(chosen.function))
    if chosen.buffers:
        course = memory.timeline(step, *args, target=chosen.target)
        return str(course), course.records()
    found = memory.analyze(step, *args, target=chosen.target)
    sizes = {
        "temporary": found.temp_bytes,
        "arguments": found.argument_bytes,
        "outputs": found.output_bytes,
        "donated": found.alias_bytes,
        "in all": found.total_bytes,
    }
    lines = [f"{name:<10} {format_bytes(size):>12}" for name, size in sizes.items()]
    lines += [f"{count:>4} {name}" for name, count in found.collectives.items()]
    data = {name: size for name, size in sizes.items()}
    more = {"collectives": found.collectives, "kernels": found.kernels}
    return "\n".join(lines), data | more | {"compile_seconds": found.compile_seconds}


def _max_batch(chosen: argparse.Namespace) -> tuple[Any, Any]:
    make_step = load(chosen.function)
    parse_bytes(chosen.memory)
    found = memory.max_batch(
        lambda size, policy: _described(lambda: make_step(size, policy)),
        chosen.memory,
        target=chosen.target,
        policies=[name.strip() for name in chosen.policies.split(",")],
        start=chosen.start,
        multiple=chosen.multiple,
        tolerance=chosen.tolerance,
    )
    return found, found.to_json()


def load(name: str) -> Callable[..., Any]:
    """Finds a function by the name of its module and its own.

    Args:
        name: such as "package.train:make_step"; the working directory is searched first.

    Raises:
        ValueError: the name has another form, or the module has no such function.
        ModuleNotFoundError: there is no such module.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"the function must be given as MODULE:FUNCTION, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name} must be a function, got {type(found).__name__}")
    return found


def _described(function: Callable[[], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step and its arguments' shapes, which are all that is made of the arguments."""
    steps: list[Any] = []
    static: dict[int, Any] = {}

    def arguments() -> list[Any]:
        result = function()
        step, args = step_and_args(result, "the function")
        leaves, tree = jax.tree.flatten(tuple(args))
        steps.append((step, tree))
        static.update({i: leaf for i, leaf in enumerate(leaves) if not _is_array(leaf)})
        return [leaf if _is_array(leaf) else None for leaf in leaves]

    leaves = jax.eval_shape(arguments)
    step, tree = steps[0]
    merged = [static.get(i, leaf) for i, leaf in enumerate(leaves)]
    return step, jax.tree.unflatten(tree, merged)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


if __name__ == "__main__":
    sys.exit(main())
