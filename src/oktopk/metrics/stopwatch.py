"""Where the time of a reduction goes: named stages, also visible to torch.profiler."""

from __future__ import annotations

import time

from torch._C._profiler import _RecordFunctionFast  # record_function itself costs thirty times as much

from .events import Span


class Stage:
    """One stage under way. There are hundreds in a step, so it must cost next to nothing.

    The worker has a thread of its own: torch.profiler shows it with profile_all_threads=True.
    """

    __slots__ = ("_name", "_range", "_spans", "_start")

    def __init__(self, spans: list[Span], name: str) -> None:
        self._spans, self._name = spans, name
        self._range = _RecordFunctionFast(f"oktopk.{name}")

    def __enter__(self) -> None:
        self._range.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._spans.append(Span(self._name, self._start, time.perf_counter()))
        self._range.__exit__(*exception)


class Stopwatch:
    """The stages of one reduction, in the order they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def stage(self, name: str) -> Stage:
        return Stage(self.spans, name)

    def seconds(self, name: str) -> float:
        return sum(span.stop - span.start for span in self.spans if span.name == name)
