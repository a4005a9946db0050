"""Metered: a communicator that counts what it sends, receives and waits for."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from torch import Tensor

from ..metrics.stopwatch import Stopwatch
from ..metrics.traffic import Operation, Tally, Traffic, ring, total
from .base import Communicator, Pending, Wrapped


class Metered(Wrapped):
    """Wraps any communicator; `traffic` has one entry per operation and phase."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers = inner, inner.numbers
        self.stopwatch: Stopwatch | None = None
        """If set, the time of every operation is noted there too."""
        self._tallies: dict[Operation, Tally] = {}

    @property
    def traffic(self) -> dict[Operation, Traffic]:
        return {operation: tally.traffic() for operation, tally in self._tallies.items()}

    def take(self) -> dict[Operation, Traffic]:
        """The traffic since the last call."""
        taken, self._tallies = self.traffic, {}
        return taken

    def payload(self) -> Traffic:
        return total(self.traffic, lambda operation: not operation.control)

    def control(self) -> Traffic:
        return total(self.traffic, lambda operation: operation.control)

    def tally(self, operation: Operation) -> Tally:
        found = self._tallies.get(operation)
        if found is None:
            found = self._tallies[operation] = Tally()
        return found

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        pending = self.inner.post_send(message, peer, operation)
        self.tally(operation).sent(message.numel())
        return pending

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return _CountedReceive(self, self.inner.post_recv(capacity, peer, operation), operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        with _Timed(self, operation, nullcontext()):  # the inner one measures itself
            self.inner.all_reduce_(x, phase, control=control)
        self.tally(operation).add(ring(x.nbytes, self.world))

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        return _Timed(self, operation, self.inner.measure(operation))


class _Timed:
    """The time from entering to leaving, for the tally of the operation and for the stopwatch."""

    __slots__ = ("inner", "meter", "operation", "stage", "start")

    def __init__(self, meter: Metered, operation: Operation, inner: AbstractContextManager[None]) -> None:
        self.meter, self.operation, self.inner = meter, operation, inner
        self.stage = None if meter.stopwatch is None else meter.stopwatch.stage("exchange")

    def __enter__(self) -> None:
        self.start = time.perf_counter()
        if self.stage is not None:
            self.stage.__enter__()
        self.inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, trace)
        if self.stage is not None:
            self.stage.__exit__(kind, error, trace)
        self.meter.tally(self.operation).seconds += time.perf_counter() - self.start


class _CountedReceive:
    def __init__(self, meter: Metered, pending: Pending, operation: Operation) -> None:
        self.meter, self.pending, self.operation = meter, pending, operation

    def wait(self, deadline: float) -> Tensor:
        message = self.pending.wait(deadline)
        self.meter.tally(self.operation).received(message.numel())
        return message
