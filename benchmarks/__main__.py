"""The command line: `python -m benchmarks {peak,time,fidelity,flax,frontier,...} ...`."""

import argparse
from collections.abc import Sequence

import jact.memory
from benchmarks import (
    accuracy,
    adaptive,
    choose,
    codecs,
    deep,
    fidelity,
    flax,
    frontier,
    fuzz,
    kernels,
    max_batch,
    options,
    output,
    peak,
    peers,
    scale,
    sensitivity,
    time,
    timeline,
)

COMMANDS = {
    "peak": peak,
    "max_batch": max_batch,
    "scale": scale,
    "timeline": timeline,
    "choose": choose,
    "time": time,
    "fidelity": fidelity,
    "flax": flax,
    "frontier": frontier,
    "sensitivity": sensitivity,
    "adaptive": adaptive,
    "accuracy": accuracy,
    "deep": deep,
    "peers": peers,
    "fuzz": fuzz,
    "codecs": codecs,
    "kernels": kernels,
}


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser; each command is a module that adds its own options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=(module.__doc__ or "").partition("\n")[0],
            description=module.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if hasattr(module, "run"):
            options.add_json(command)
        else:
            options.add_shared(command)
        module.add_options(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and writes its table and its JSON."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    command = COMMANDS[chosen.command]
    try:
        if command is kernels:
            kernels.show(kernels.run(chosen), chosen.json)
            return
        # A command that goes by models and policies measures case by case; others do it all.
        if hasattr(command, "run"):
            rows = list(command.run(chosen))
        else:
            rows = [row for case in options.cases(chosen) for row in command.measure(case, chosen)]
    except jact.memory.MissingPluginError as error:
        parser.error(str(error))
    line = getattr(command, "LINE", "policy")
    output.write(chosen.command, rows, command.COLUMNS, chosen.json, line=line)
    if hasattr(command, "finish"):
        command.finish(rows, chosen)


if __name__ == "__main__":
    main()
