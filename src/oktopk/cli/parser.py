"""The parser of all commands: errors are one line, and suggest the name that was probably meant."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from oktopk.utils.names import closest, hint

_COMMANDS = "COMMAND", "ACTION"
"""Placeholders of subcommands in usages."""
_MISSING = "missing: "
_PLAINER = (
    (re.compile(r"argument (\S+): expected (one|at least one) argument"), r"\1 needs a value"),
    (re.compile(r"argument (\S+): must"), r"\1 must"),
    (re.compile(r"argument (\S+): not allowed with argument (\S+)"), r"\1 and \2 cannot be combined"),
    (re.compile(r"argument (\S+): ignored explicit argument (.*)"), r"\1 takes no value, got \2"),
    (re.compile(r"the following arguments are required: (.*)"), _MISSING + r"\1"),
    (re.compile(r"^argument (\S+): "), r"\1: "),
)
"""What argparse says, and how a user would."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words: one that is not known is an error of the command that got it."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest))
        return found, rest

    def error(self, message: str) -> NoReturn:
        for pattern, plainer in _PLAINER:
            message = pattern.sub(plainer, message)
        if message.startswith(_MISSING):
            message += f"; see {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices: Iterable[str] | None = action.choices
        if choices is None or value in choices:
            return
        if action.metavar in _COMMANDS:
            what = f"unknown {str(action.metavar).lower()} {value!r}"
        else:
            what = f"{action.option_strings[0]} {value!r} is unknown"
        raise argparse.ArgumentError(None, f"{what}: {hint(value, choices)}")

    def _unknown(self, words: Sequence[str]) -> str:
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return f"unexpected argument {words[0]!r}"
        known = [text for text in self._option_string_actions if text.startswith("--")]
        close = closest(flags[0], known)
        return f"unknown option {flags[0]}: " + (f"did you mean {close}?" if close else f"see {self.prog} --help")


def add_alias(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Understand another name of an option, which the help does not list."""
    parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def find_imports(words: Sequence[str]) -> list[str]:
    """The modules of --import, before anything else is parsed: they may add what other options name.

    >>> find_imports(["train", "--import", "a", "--lr", "1", "--import=b,c", "--", "--import", "d"])
    ['a', 'b', 'c']
    """
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        flag, mark, value = word.partition("=")
        if flag == "--import":
            found += (value if mark else next(rest, "")).split(",")
    return [name.strip() for name in found if name.strip()]


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        metavar="MODULE",
        help="import a module that adds algorithms, networks, sinks or value formats, here and in all processes "
        "that are started (docs/plugins.md); repeat it for more",
    )


def add_current_folder() -> None:
    """Let --import find modules in the current folder, as `python -m` does; after all others."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
