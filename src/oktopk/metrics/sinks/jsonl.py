"""Events as lines of JSON, for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..events import StepEvent
from .base import Sink
from .files import LineFile
from .flat import flat_reduction, flat_step, flat_traffic

encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""Strict JSON on one line."""


def parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class JSONLSink(Sink):
    """One line per reduction, then one for their step: where a step stands, all of it stands. The step's line has
    its traffic, too: what each operation moved, with the sizes of messages.

    An existing file is continued. A run that resumes from a checkpoint repeats the steps since then: of two
    lines for the same step, the later one counts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._file = LineFile(path, _check)
        self.path = self._file.path

    def _write(self, event: StepEvent) -> None:
        rows = [*map(flat_reduction, event.reductions), flat_step(event) | {"traffic": flat_traffic(event)}]
        self._file.write("".join(encode(row) + "\n" for row in rows))

    def add(self, event: str, step: int, row: Mapping[str, Any]) -> None:
        """A line of another kind among the others, such as a validation."""
        with self._lock:
            self._file.write(encode({"event": event, "step": step, **row}) + "\n")

    def _finish(self) -> None:
        self._file.close()


def _check(file: LineFile) -> None:
    mark = b'{"event":'
    file.finish_last_line(whole=parses, ours=lambda line: line.startswith(mark) or mark.startswith(line))
