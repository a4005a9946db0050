"""The verdicts of a run: kept in a file as they come, and counted at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stress.chaos.judging import ABORTED, CHANGED, ENDED, HANG, LEAK, MISSED, WENT_ON, WRONG, Verdict
from stress.lines import keep_line, kept_lines

GOOD = (ENDED, WENT_ON, CHANGED, ABORTED)
_COLUMNS = {"named error": ENDED, "continued": WENT_ON, "hangs": HANG, "wrong": WRONG, "leaks": LEAK}
_RARE = {"not struck": MISSED, "changed sum": CHANGED, "gloo aborted": ABORTED}
"""Columns that a table has only if there is something in them."""


class Results:
    """What is known of each case, by where it ran and its number: in a file of JSON lines, if there is one.

    A run that was interrupted goes on with the same file, and does not repeat what is there.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[tuple[str, int], Verdict] = {}
        for entry in kept_lines(path):
            self._remember(entry)

    def _remember(self, entry: dict[str, Any]) -> None:
        late = entry.pop("late")
        where = entry.pop("where")
        self.known[where, entry["number"]] = Verdict(**entry, late=-math.inf if late is None else late)

    def missing(self, where: str, numbers: Iterable[int]) -> list[int]:
        """Those of which nothing is known yet."""
        return [number for number in numbers if (where, number) not in self.known]

    def kept(self, where: str, verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
        """The verdicts, each written before the next one is asked for."""
        for verdict in verdicts:
            self.known[where, verdict.number] = verdict
            late = verdict.late if math.isfinite(verdict.late) else None
            keep_line(self.path, {"where": where, **asdict(verdict), "late": late})
            yield verdict

    def of(self, where: str, numbers: Iterable[int]) -> list[Verdict]:
        return [self.known[where, number] for number in numbers if (where, number) in self.known]


def table(verdicts: Sequence[Verdict]) -> str:
    """By fault, and of all, in Markdown."""
    kinds = sorted({one.kind for one in verdicts})
    columns = _COLUMNS | {name: went for name, went in _RARE.items() if any(one.went == went for one in verdicts)}
    rows = [["fault", "cases", *columns], ["---"] * (2 + len(columns))]
    for kind in (*kinds, "all"):
        its = [one for one in verdicts if kind in ("all", one.kind)]
        counts = Counter(one.went for one in its)
        rows.append([kind, str(len(its)), *(str(counts[went]) for went in columns.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace(" --- ", "---")


def latest(verdicts: Sequence[Verdict]) -> str:
    """How long after the fault and the timeout the last error came."""
    late = max(verdicts, key=lambda one: one.late, default=None)
    if late is None or late.late == -math.inf:
        return "no errors"
    return f"errors came at most {max(late.late, 0):.1f} s after their timeout ({late.kind})"
