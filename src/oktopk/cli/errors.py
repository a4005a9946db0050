"""Print errors the way commands do: one line on stderr."""

from __future__ import annotations

import sys


def print_error(command: str, error: BaseException, prefix: str = "") -> None:
    """Print `oktopk COMMAND: error: …`; a broken pipe is raised again, for main() to end the program."""
    if isinstance(error, BrokenPipeError):
        raise error
    print(f"oktopk {command}: error: {prefix}{describe_error(error)}", file=sys.stderr)


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the file name first if it has one.

    >>> describe_error(FileNotFoundError(2, "No such file or directory", "a.csv"))
    'a.csv: No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
