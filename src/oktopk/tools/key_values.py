"""Settings written as key=value in the name of a contender."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from oktopk.utils.names import hint


class SettingError(ValueError):
    """A word that is no setting."""


def parse_setting(word: str, known: Sequence[str]) -> tuple[str, Any]:
    """Parse key=value; a value that is no Python literal is text.

    >>> parse_setting("density=0.05", ["density"]), parse_setting("density=auto", ["density"])
    (('density', 0.05), ('density', 'auto'))
    """
    key, _, value = word.partition("=")
    if key not in known:
        raise SettingError(f"unknown setting {key!r}: {hint(key, known)}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return key, value
