"""Events as a timeline for ui.perfetto.dev and chrome://tracing.

The file is a JSON array with one step per line, appended step by step:

    [
    {"ph":"M","name":"process_name",...},...
    ,{"ph":"X","name":"step 7 (sparse)","ts":...,"dur":...},{"ph":"X","name":"bucket 0 (sparse)",...},...
    ]

Viewers do not need the last line, so they also open the trace of a killed process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..events import ReductionEvent, StepEvent
from .files import FileSink, LineFile
from .flat import Row, flat_reduction, flat_step
from .jsonl import encode, parses

START, END = b"[\n", b"]\n"
STEPS, WORKER = 0, 1
"""Track numbers of a rank. Overlapping reductions get further worker tracks."""
DETAILS = (
    *("phase", "algorithm", "size_entries", "count", "local_density", "global_density", "sent_bytes"),
    *("received_bytes", "exposed_seconds", "hidden_share", "wait_seconds", "slowest_rank", "skipped", "culprits"),
)
"""The columns that a viewer shows for a selected slice."""


class TraceSink(FileSink):
    """Writes a timeline for ui.perfetto.dev and chrome://tracing.

    Each rank is a process with a track for the steps and the exposed part of each, a track for the worker with
    the stages of each reduction, and counters for bytes sent and densities. Times are microseconds of the wall
    clock, so the traces of several ranks line up; merge_traces() joins them.

    Args:
        path: The file. An existing trace is appended to.
        rank: The rank to show.

    Raises:
        ValueError: The file exists and is not a trace.
        OSError: The file cannot be written.

    Example:
        >>> import json, oktopk, tempfile, torch
        >>> from pathlib import Path
        >>> from oktopk.metrics.sinks import TraceSink
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "trace.json")
        ...     with oktopk.AllReducer(parameters, density=0.1, sinks=[TraceSink(path)]) as reducer:
        ...         grads = reducer.sync({"w": torch.ones(50)})
        ...     events = json.loads(path.read_text())
        >>> [event["name"] for event in events if event.get("cat") == "step"]
        ['step 0 (dense)', 'exposed']
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.rank = rank
        self._anchor = _wall_clock_anchor()
        self._workers = 0
        super().__init__(path)

    def _check(self, file: LineFile) -> None:
        if file.size and file.first_line() != START:
            raise ValueError(f"{file.path} is not a trace: choose another file")
        # A truncated line may still parse without its last events: only the line feed shows that it is complete.
        file.finish_last_line(whole=lambda _: False, ours=lambda line: line[:1] in (b",", b"{"))
        if file.last_line() == END:
            file.truncate_by(len(END))
        if file.last_line() == START:  # the trace is empty
            file.truncate_by(len(START))
        names = [
            self._metadata("process_name", STEPS, name=f"rank {self.rank}"),
            self._metadata("process_sort_index", STEPS, sort_index=self.rank),
            self._metadata("thread_name", STEPS, name="steps"),
        ]
        line = _line(names)
        file.write(line if file.size else START.decode() + line.removeprefix(","))

    def _write(self, event: StepEvent) -> None:
        self._file.write(_line(self._step(event)))

    def _close(self) -> None:
        try:
            self._file.write(END.decode())
        finally:
            super()._close()

    def _step(self, event: StepEvent) -> Iterator[dict[str, Any]]:
        name = f"step {event.step} ({event.phase})"
        yield self._slice(name, "step", event.start, event.stop, STEPS, flat_step(event))
        if event.exposed > 0:
            yield self._slice("exposed", "step", max(event.start, event.handed_over), event.stop, STEPS)
        ends: list[float] = []  # of the last reduction on each worker track
        for reduction in sorted(event.reductions, key=lambda one: one.start):
            if reduction.stop == 0.0:
                continue  # no times were recorded
            worker = next((i for i, end in enumerate(ends) if end <= reduction.start), len(ends))
            ends[worker : worker + 1] = [reduction.stop]
            yield from self._reduction(reduction, worker)
        yield self._counter("bytes sent", event.start, sent=event.wire.sent_bytes)
        densities = {"target": event.target_density, "sent": event.local_density, "result": event.global_density}
        yield self._counter("density", event.start, **densities)

    def _reduction(self, event: ReductionEvent, worker: int) -> Iterator[dict[str, Any]]:
        track = WORKER + worker
        if worker == self._workers:
            self._workers += 1
            yield self._metadata("thread_name", track, name=f"worker {self._workers}" if worker else "worker")
        name = f"bucket {event.bucket} ({event.phase})"
        yield self._slice(name, "reduction", event.start, event.stop, track, flat_reduction(event))
        for span in sorted(event.spans, key=lambda one: (one.start, -one.stop)):  # the outer one comes first
            start, stop = (min(max(at, event.start), event.stop) for at in (span.start, span.stop))
            yield self._slice(span.name, "stage", start, stop, track)

    def _slice(
        self, name: str, kind: str, start: float, stop: float, track: int, row: Row | None = None
    ) -> dict[str, Any]:
        # Round both ends before subtracting: a slice inside another one then stays inside.
        begin, end = self._microseconds(start), self._microseconds(stop)
        args = {key: row[key] for key in DETAILS if row.get(key) is not None} if row else {}
        where = {"ts": begin, "dur": max(0, end - begin), "pid": self.rank, "tid": self._thread(track)}
        return {"ph": "X", "name": name, "cat": kind, **where, "args": args}

    def _counter(self, name: str, at: float, **values: float) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": self.rank, "ts": self._microseconds(at), "args": values}

    def _metadata(self, kind: str, track: int, **value: object) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self.rank, "tid": self._thread(track), "args": value}

    def _thread(self, track: int) -> int:
        """A thread id that no other rank has, and not 0 or the process id, which viewers treat specially."""
        return 1000 * (self.rank + 1) + track

    def _microseconds(self, at: float) -> int:
        return round((at + self._anchor) * 1e6)


def merge_traces(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Merge the traces of all ranks of a run into one, line by line, so that they may be larger than memory.

    Args:
        paths: Traces written by TraceSink, also by processes that were killed.
        out: The file for the result; must not be one of the paths.

    Raises:
        ValueError: A file is not a trace, or `out` is one of the paths.
    """
    sources = [Path(path) for path in paths]
    if Path(out).resolve() in [source.resolve() for source in sources]:
        raise ValueError(f"{out} is one of the traces to merge: choose another file for the result")
    with open(out, "wb") as file:
        file.write(START)
        comma = b""
        for source in sources:
            for events in _event_lines(source):
                file.write(comma + events + b"\n")
                comma = b","
        file.write(END)


def _event_lines(path: Path) -> Iterator[bytes]:
    """Read the events of a trace line by line, without an unfinished last line."""
    with open(path, "rb") as file:
        if file.readline() != START:
            raise ValueError(f"{path} is not a trace written by TraceSink")
        for number, line in enumerate(file, start=2):
            if line == END or not line.endswith(b"\n"):
                continue
            events = line.strip().removeprefix(b",")
            if not parses(b"[" + events + b"]"):
                raise ValueError(f"{path}:{number} is not a valid trace line")
            yield events


def _line(events: Iterable[dict[str, Any]]) -> str:
    # One call for all events: a call costs as much as an event.
    return f",{encode([*events])[1:-1]}\n"


def _wall_clock_anchor() -> float:
    """The offset from perf_counter() to the time of day, from the least interrupted of several attempts."""
    tries = []
    for _ in range(9):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        tries.append((after - before, wall - (before + after) / 2))
    return min(tries)[1]
