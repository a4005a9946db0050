"""What is wrong with data: single faults are collected, and what cannot be gone on with is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oktopk.errors import OkTopkError


class DataError(OkTopkError, ValueError):
    """Data that cannot be used."""


@dataclass(frozen=True)
class Problem:
    """One fault that costs one sample or one file, not the run.

    >>> str(Problem("an4_train_manifest.csv", "a.wav is missing", line=3))
    'an4_train_manifest.csv:3: a.wav is missing'
    """

    where: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        place = self.where if self.line is None else f"{self.where}:{self.line}"
        return f"{place}: {self.what}"


def listing(problems: Sequence[Problem], limit: int = 20) -> str:
    """One line each, for a log or an error; of a long list the first ones and how many more there are."""
    lines = [f"  {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  … and {len(problems) - limit} more")
    return "\n".join(lines)
