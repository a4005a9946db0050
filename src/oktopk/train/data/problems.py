"""Problems in data: one bad sample is a Problem and is left out; a DataError ends the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oktopk.errors import OkTopkError


class DataError(OkTopkError, ValueError):
    """Data that cannot be used."""


@dataclass(frozen=True)
class Problem:
    """A defect of one sample or file, which is then left out.

    >>> str(Problem("an4_train_manifest.csv", "a.wav is missing", line=3))
    'an4_train_manifest.csv:3: a.wav is missing'
    """

    where: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        place = self.where if self.line is None else f"{self.where}:{self.line}"
        return f"{place}: {self.what}"


def format_problems(problems: Sequence[Problem], limit: int = 20) -> str:
    """Format one line per problem, for a log or an error; a long list is cut at `limit`."""
    lines = [f"  {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  … and {len(problems) - limit} more")
    return "\n".join(lines)
