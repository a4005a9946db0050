"""The command line: `oktopk --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from oktopk import __version__
from oktopk.utils.extras import how_to_install
from oktopk.utils.registry import IMPORT, import_modules

from .parser import Parser, add_current_folder, add_import, find_imports

COMMANDS = {
    "demo": "see the point in three minutes: dense and oktopk over the same slow link",
    "train": "train a model and record what happened",
    "sweep": "train with several algorithms, densities and seeds, and compare them",
    "report": "show one run or compare several: as a page, as JSON, or live",
    "bench": "time all algorithms beside DDP and PyTorch's communication hooks",
    "race": "train several contenders over emulated links to the same quality, and compare wall time",
    "simulate": "predict how an all-reduce scales to P ranks, from recorded messages and a network model",
    "doctor": "check machines and links: can they train, and is sparse faster than dense here?",
    "data": "import, check and repair training data",
    "jobscript": "write a job script for SLURM or PBS",
}
"""Each command is a module in `commands` with add_arguments(parser) and run(options) -> exit code. Only the
requested command is imported, because the others may need packages that are not installed.
"""


def make_parser(words: Sequence[str]) -> Parser:
    top = Parser(
        prog="oktopk",
        description="Sparse gradient all-reduce with error feedback for PyTorch: train with it, and measure it.",
    )
    top.add_argument("--version", action="version", version=f"oktopk {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        own = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in words[:1]:
            command = import_module(f".commands.{name}", __package__)
            own.description = command.__doc__
            add_import(own)
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    words = replace_underscores(sys.argv[1:] if argv is None else argv)
    if not words:
        make_parser(words).print_help()
        return 0
    if problem := _import_plugins(words):
        print(f"oktopk {words[0]}: error: {problem}", file=sys.stderr)
        return 2
    try:
        options = make_parser(words).parse_args(words)
        options.words = words
        return int(options.run(options))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "oktopk":
            raise
        missing = f"the package {error.name} is not installed: {how_to_install(error.name)}"
        print(f"oktopk {words[0]}: error: {missing}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _import_plugins(words: Sequence[str]) -> str | None:
    """Import what --import and the environment name, before the command looks for names; returns what fails."""
    wanted = find_imports(words)
    if wanted or IMPORT in os.environ:
        add_current_folder()
    try:
        import_modules(wanted)
    except ImportError as error:
        return f"{'--import' if error.name in wanted else IMPORT} {error}"
    return None


def replace_underscores(words: Sequence[str]) -> list[str]:
    """Write option names with dashes; values stay as they are.

    >>> replace_underscores(["train", "--data_dir", "./my_data", "--max_epochs=1"])
    ['train', '--data-dir', './my_data', '--max-epochs=1']
    """
    changed = []
    for word in words:
        name, mark, value = word.partition("=")
        changed.append(name.replace("_", "-") + mark + value if name.startswith("--") else word)
    return changed
