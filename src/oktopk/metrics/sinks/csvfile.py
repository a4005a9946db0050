"""Events as a CSV table, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable

from ..events import StepEvent
from .files import FileSink, LineFile
from .flat import REDUCTION_COLUMNS, STEP_COLUMNS, flat_reduction, flat_step

COLUMNS = {"step": STEP_COLUMNS, "reduction": REDUCTION_COLUMNS}


class CSVSink(FileSink):
    """Writes one row per step or per reduction, with the columns of JSONLSink. An empty cell means null.

    Args:
        path: The file. An existing one is appended to if its columns are the same.
        of: "step" for a row per step, "reduction" for a row per reduction of a bucket.

    Raises:
        ValueError: The file exists with other columns.
        OSError: The file cannot be written.

    Example:
        >>> import oktopk, tempfile, torch
        >>> from pathlib import Path
        >>> from oktopk.metrics.sinks import CSVSink
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "metrics.csv")
        ...     with oktopk.AllReducer(parameters, density=0.1, sinks=[CSVSink(path)]) as reducer:
        ...         grads = reducer.sync({"w": torch.ones(50)})
        ...     lines = path.read_text().splitlines()
        >>> [line[:25] for line in lines]
        ['event,step,phase,buckets,', 'step,0,dense,1,50,50,50,5']
    """

    def __init__(self, path: str | os.PathLike[str], of: str = "step") -> None:
        if of not in COLUMNS:
            raise ValueError(f"of must be one of {', '.join(COLUMNS)}, got {of!r}")
        self.of = of
        super().__init__(path)

    def _check(self, file: LineFile) -> None:
        header = _text([COLUMNS[self.of]])
        if file.size == 0:
            file.write(header)
            return
        found = file.first_line().decode(errors="replace")
        if found.rstrip("\r\n") != header.rstrip("\n"):
            raise ValueError(
                f"{file.path} exists with other columns than {self.of} events have: choose another file"
                f" ({_difference(found.rstrip().split(','), COLUMNS[self.of])})"
            )
        # A row may be truncated anywhere, even inside its last number: only the header is known to be complete.
        file.finish_last_line(whole=lambda line: line == found.encode(), ours=lambda _: True)

    def _write(self, event: StepEvent) -> None:
        rows = [flat_step(event)] if self.of == "step" else [*map(flat_reduction, event.reductions)]
        if rows:
            self._file.write(_text(row.values() for row in rows))


def _text(rows: Iterable[Iterable[object]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _difference(found: list[str], wanted: tuple[str, ...]) -> str:
    missing = [name for name in wanted if name not in found]
    strange = [name for name in found if name not in wanted]
    parts = [("missing", missing), ("unknown", strange)]
    return "; ".join(f"{label}: {', '.join(names[:5])}" for label, names in parts if names) or "in another order"
