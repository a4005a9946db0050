"""Events as a table, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable

from ..events import StepEvent
from .base import Sink
from .files import LineFile
from .flat import REDUCTION_COLUMNS, STEP_COLUMNS, flat_reduction, flat_step

COLUMNS = {"step": STEP_COLUMNS, "reduction": REDUCTION_COLUMNS}


class CSVSink(Sink):
    """One row per step, or per reduction: the columns are those of JSONLSink's lines, an empty cell is null.

    An existing file is continued, if its columns are the same.
    """

    def __init__(self, path: str | os.PathLike[str], of: str = "step") -> None:
        if of not in COLUMNS:
            raise ValueError(f"of must be one of {', '.join(COLUMNS)}, got {of!r}")
        super().__init__()
        self.of = of
        self._file = LineFile(path, self._check)
        self.path = self._file.path

    def _check(self, file: LineFile) -> None:
        header = _text([COLUMNS[self.of]])
        if file.size == 0:
            file.write(header)
            return
        found = file.first_line().decode(errors="replace")
        if found.rstrip("\r\n") != header.rstrip("\n"):
            raise ValueError(
                f"{file.path} has other columns than those of a {self.of}: metrics need a file of their own"
                f" ({_difference(found.rstrip().split(','), COLUMNS[self.of])})"
            )
        # A row may be cut anywhere, even inside its last number: only the header can be known to be whole.
        file.finish_last_line(whole=lambda line: line == found.encode(), ours=lambda _: True)

    def _write(self, event: StepEvent) -> None:
        rows = [flat_step(event)] if self.of == "step" else [*map(flat_reduction, event.reductions)]
        if rows:
            self._file.write(_text(row.values() for row in rows))

    def _finish(self) -> None:
        self._file.close()


def _text(rows: Iterable[Iterable[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _difference(found: list[str], wanted: tuple[str, ...]) -> str:
    missing = [name for name in wanted if name not in found]
    strange = [name for name in found if name not in wanted]
    parts = [("missing", missing), ("unknown", strange)]
    return "; ".join(f"{label}: {', '.join(names[:5])}" for label, names in parts if names) or "in another order"
