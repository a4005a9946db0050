"""Measure CPU time: of a thread's stages, and of its communication."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from oktopk.comm import Communicator, Pending
from oktopk.metrics.traffic import Operation, Span, Stage, Stopwatch


class _ProcessorStage(Stage):
    __slots__ = ()

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._spans.append(Span(self._name, self._start, time.thread_time()))


class ProcessorWatch(Stopwatch):
    """A stopwatch of the thread's CPU time."""

    def stage(self, name: str) -> Stage:
        return _ProcessorStage(self.spans, name)


class TransportTimer(Communicator):
    """Wraps a communicator and sums the CPU time spent in it; take() returns the time since the last call."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self._seconds = inner, 0.0

    def take(self) -> float:
        taken, self._seconds = self._seconds, 0.0
        return taken

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self._seconds += time.thread_time() - start

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        with self.timed():
            return _TimedPending(self, self.inner.post_send(message, peer, operation))

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        with self.timed():
            return _TimedPending(self, self.inner.post_recv(capacity, peer, operation))

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        with self.timed():
            self.inner.all_reduce_(x, phase, control=control)

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        return self.inner.measure(operation)


class _TimedPending:
    def __init__(self, timer: TransportTimer, pending: Pending) -> None:
        self.timer, self.pending = timer, pending

    def wait(self, deadline: float) -> Tensor:
        with self.timer.timed():
            return self.pending.wait(deadline)
