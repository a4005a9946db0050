"""The command line: `oktopk --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from oktopk import __version__
from oktopk.utils.extras import how_to_install

COMMANDS = {
    "train": "train a network, and write down what happened",
    "sweep": "train by several algorithms, densities and seeds, and compare",
    "report": "look at a run or compare several: a page, JSON, or live",
    "bench": "compare all algorithms with PyTorch's own ways, side by side",
    "simulate": "how a reduction would scale to P ranks, from real messages and a model of the network",
    "doctor": "look at machines and links: can they train, and does compression pay?",
    "data": "make data ready for training, and mend it",
    "jobscript": "write a job script for SLURM or PBS",
}
"""A command is a module of that name with add_arguments(parser) and run(options), which returns the exit code.
Only the one that is asked for is imported: the others may need packages that are not there."""


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="oktopk", description="Sparse gradient allreduce for PyTorch: train with it, and see what it does."
    )
    top.add_argument("--version", action="version", version=f"oktopk {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, meaning in COMMANDS.items():
        own = commands.add_parser(
            name, help=meaning, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name in words[:1]:
            command = import_module(f".{name}", __package__)
            own.description = command.__doc__
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = dashed(sys.argv[1:] if argv is None else argv)
    try:
        options = parser(words).parse_args(words)
        options.words = words
        return int(options.run(options))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "oktopk":
            raise
        missing = f"the package {error.name} is not installed: {how_to_install(error.name)}"
        print(f"oktopk {words[0]}: error: {missing}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def dashed(words: Sequence[str]) -> list[str]:
    """Names of options with dashes, however they were written.

    >>> dashed(["train", "--data_dir", "./my_data", "--max_epochs=1"])
    ['train', '--data-dir', './my_data', '--max-epochs=1']
    """
    changed = []
    for word in words:
        name, mark, value = word.partition("=")
        changed.append(name.replace("_", "-") + mark + value if name.startswith("--") else word)
    return changed
