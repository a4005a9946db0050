"""Events as JSON lines, for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, SupportsFloat

from ...errors import OkTopkError
from ..events import StepEvent
from .files import FileSink, LineFile
from .flat import finite, flat_reduction, flat_step, flat_traffic

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

    Before the first step there is a line "run" (ranks, algorithm, density). A line "decision" follows when all
    ranks have compared dense and sparse, a line "end" when the front end is closed. With record_loss() and
    record_validation() in your own training loop, `oktopk report` has all its answers, if the file is named
    metrics.jsonl.

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
        >>> [(row["event"], row["step"], row.get("payload_bytes")) for row in rows]
        [('run', 0, None), ('reduction', 0, 200), ('step', 0, 200), ('end', 1, None)]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._step: int | None = None
        """The last one that was written."""
        self._recorded: tuple[int | None, float | None] = None, None
        """The last step whose loss was recorded, and when."""
        self._seconds: float | None = None

    def _check(self, file: LineFile) -> None:
        mark = b'{"event":'
        file.finish_last_line(whole=parses, ours=lambda line: line.startswith(mark) or mark.startswith(line))

    def _write(self, event: StepEvent) -> None:
        self._step = event.step
        rows = [*map(flat_reduction, event.reductions), flat_step(event) | {"traffic": flat_traffic(event)}]
        self._file.write("".join(encode(row) + "\n" for row in rows))

    def record_loss(self, loss: SupportsFloat, **figures: SupportsFloat) -> None:
        """Write the loss of the step that has just been averaged, for `oktopk report`.

        Call it once per step, after optimizer.step(). The time since the last call is written as `step_seconds`.

        Args:
            loss: of this rank, or the mean over ranks; one that is not finite is left out.
            **figures: other numbers of the step, such as lr. `forward_seconds` and `backward_seconds` let the
                report tell computation from the rest.
        """
        now = time.perf_counter()
        with self._lock:
            step, (before, began) = self._step, self._recorded
            if step is None:
                raise OkTopkError("record_loss() before the first step: call it after optimizer.step()")
            if step != before:
                self._recorded, self._seconds = (step, now), None if began is None else now - began
            taken = {} if self._seconds is None else {"step_seconds": self._seconds}
            self.add("train", step, {"loss": float(loss), **taken, **_floats(figures)})

    def record_validation(self, epoch: int | None = None, **figures: SupportsFloat) -> None:
        """Write the figures of a validation after the last step, for `oktopk report`.

        Args:
            epoch: the epoch that it ends, if there is one.
            **figures: its results, such as loss and accuracy.
        """
        with self._lock:
            done = 0 if self._step is None else self._step + 1
            self.add("validation", done, ({} if epoch is None else {"epoch": epoch}) | _floats(figures))

    def note(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        self.add(kind, step, facts)

    def add(self, event: str, step: int, row: Mapping[str, Any]) -> None:
        """Write a line of another kind. Numbers that are not finite become null."""
        line = encode({"event": event, "step": step, **finite(row)}) + "\n"
        with self._lock:
            self._switch.run(lambda: self._file.write(line))


def _floats(figures: Mapping[str, SupportsFloat]) -> dict[str, float]:
    return {name: float(figure) for name, figure in figures.items()}
