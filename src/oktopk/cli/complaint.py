"""Errors as a command says them: one sentence, on stderr."""

from __future__ import annotations

import sys


def complain(command: str, error: BaseException, who: str = "") -> None:
    if isinstance(error, BrokenPipeError):
        raise error  # nobody listens: main() ends the program
    print(f"oktopk {command}: error: {who}{sentence(error)}", file=sys.stderr)


def sentence(error: BaseException) -> str:
    """
    >>> sentence(FileNotFoundError(2, "No such file or directory", "a.csv"))
    'a.csv: No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
