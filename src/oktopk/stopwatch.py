"""Where the time of a reduction goes: named stages, also visible to torch.profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import record_function

from .metrics import Span


class Stopwatch:
    """The stages of one reduction, in the order they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with record_function(f"oktopk.{name}"):
            start = time.perf_counter()
            try:
                yield
            finally:
                self.spans.append(Span(name, start, time.perf_counter()))

    def seconds(self, name: str) -> float:
        return sum(span.stop - span.start for span in self.spans if span.name == name)
