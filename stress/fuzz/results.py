"""What has become of cases: counted, and kept in a file slice by slice, so that a run can go on later."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stress.lines import keep_line, kept_lines


class Slice(NamedTuple):
    """The cases begin … end - 1, which one process judges; `checked`: with bounds checks."""

    what: str
    begin: int
    end: int
    checked: bool


@dataclass
class Tally:
    """What has become of cases."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """Number of the case, kind, what was wrong."""
    peak_bytes: int = 0
    operations: int = 0
    """Messages that were decoded, or reductions."""

    @property
    def cases(self) -> int:
        return sum(self.counts.values()) + len(self.failures)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.failures += other.failures
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.operations += other.operations

    def to_json(self) -> dict[str, Any]:
        counts = [[kind, outcome, count] for (kind, outcome), count in self.counts.items()]
        rest = {"peak_bytes": self.peak_bytes, "operations": self.operations}
        return {"counts": counts, "failures": self.failures, **rest}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Tally:
        counts = Counter({(kind, outcome): count for kind, outcome, count in content["counts"]})
        return cls(
            counts, [tuple(row) for row in content["failures"]], content["peak_bytes"], content["operations"]
        )


class Results:
    """The tallies of slices: in a file of JSON lines, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[Slice, Tally] = {}
        self._turn = threading.Lock()
        for content in kept_lines(path):
            self.known[Slice(*content.pop("slice"))] = Tally.from_json(content)

    def keep(self, place: Slice, tally: Tally) -> None:
        with self._turn:
            self.known[place] = tally
            keep_line(self.path, {"slice": place, **tally.to_json()})
