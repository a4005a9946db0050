"""Events as JSON lines, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..events import StepEvent
from .files import FileSink, LineFile
from .flat import flat_reduction, flat_step, flat_traffic

encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""Strict JSON on one line."""


def parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class JSONLSink(FileSink):
    """Writes one line per reduction, then the line of their step with the traffic by operation.

    If a step's line is in the file, the lines of its reductions are too. A run that resumes from a checkpoint
    repeats the steps since then: of two lines for the same step, the later one counts.

    Args:
        path: The file. An existing one is appended to.

    Raises:
        OSError: The file cannot be written.

    Example:
        >>> import json, oktopk, tempfile, torch
        >>> from pathlib import Path
        >>> from oktopk.metrics.sinks import JSONLSink
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "metrics.jsonl")
        ...     with oktopk.AllReducer(parameters, density=0.1, sinks=[JSONLSink(path)]) as reducer:
        ...         grads = reducer.sync({"w": torch.ones(50)})
        ...     rows = [json.loads(line) for line in path.read_text().splitlines()]
        >>> [(row["event"], row["step"], row["payload_bytes"]) for row in rows]
        [('reduction', 0, 200), ('step', 0, 200)]
    """

    def _check(self, file: LineFile) -> None:
        mark = b'{"event":'
        file.finish_last_line(whole=parses, ours=lambda line: line.startswith(mark) or mark.startswith(line))

    def _write(self, event: StepEvent) -> None:
        rows = [*map(flat_reduction, event.reductions), flat_step(event) | {"traffic": flat_traffic(event)}]
        self._file.write("".join(encode(row) + "\n" for row in rows))

    def add(self, event: str, step: int, row: Mapping[str, Any]) -> None:
        """Write a line of another kind, such as the figures of a validation."""
        line = encode({"event": event, "step": step, **row}) + "\n"
        with self._lock:
            self._switch.run(lambda: self._file.write(line))
