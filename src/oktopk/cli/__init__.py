"""The command line: `oktopk --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from oktopk import __version__

from . import bench, data, doctor, jobscript, report, simulate, sweep, train

COMMANDS = (train, sweep, report, bench, simulate, doctor, data, jobscript)
"""A command is a module with NAME, HELP, add_arguments(parser) and run(options), which returns the exit code."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="oktopk", description="Sparse gradient allreduce for PyTorch: train with it, and see what it does."
    )
    top.add_argument("--version", action="version", version=f"oktopk {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = dashed(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    options.words = words
    try:
        return int(options.run(options))
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
