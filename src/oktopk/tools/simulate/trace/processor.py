"""Time of the processor: what a thread takes in its stages, and what of it goes into the transport."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from oktopk.comm import Communicator, Pending
from oktopk.metrics.events import Span
from oktopk.metrics.stopwatch import Stage, Stopwatch
from oktopk.metrics.traffic import Operation


class _ProcessorStage(Stage):
    __slots__ = ()

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._spans.append(Span(self._name, self._start, time.thread_time()))


class ProcessorWatch(Stopwatch):
    """A stopwatch that stands still while its thread does."""

    def stage(self, name: str) -> Stage:
        return _ProcessorStage(self.spans, name)


class Outside(Communicator):
    """Wraps any communicator and adds up the time that a rank is in it; `take()` gives it, since the last call."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self._seconds = inner, 0.0

    def take(self) -> float:
        taken, self._seconds = self._seconds, 0.0
        return taken

    @contextmanager
    def entered(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self._seconds += time.thread_time() - start

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        with self.entered():
            return _Waiting(self, self.inner.post_send(message, peer, operation))

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        with self.entered():
            return _Waiting(self, self.inner.post_recv(capacity, peer, operation))

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        with self.entered():
            self.inner.all_reduce_(x, phase, control=control)

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        return self.inner.measure(operation)


class _Waiting:
    def __init__(self, outside: Outside, pending: Pending) -> None:
        self.outside, self.pending = outside, pending

    def wait(self, deadline: float) -> Tensor:
        with self.outside.entered():
            return self.pending.wait(deadline)
