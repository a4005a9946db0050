"""Metered: a communicator that counts what it sends, receives and waits for."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..metrics.traffic import Operation, Stopwatch, Tally, Traffic, ring, total
from .base import Communicator, Wrapped
from .transport import Pending, PendingSum


class Metered(Wrapped):
    """Wraps any communicator and counts its traffic, by operation and phase.

    Args:
        inner: The communicator that does the work. It may be metered itself.

    Attributes:
        traffic: What was moved since the last pop_traffic().
        stopwatch: If set, the time of every operation is recorded there too, as stage "exchange".

    >>> from oktopk import Metered, run_threads
    >>> import torch
    >>> def measure(comm):
    ...     meter = Metered(comm)
    ...     meter.all_reduce_(torch.ones(1000), "dense")
    ...     return meter.payload().sent_bytes
    >>> run_threads(4, measure)
    [6000, 6000, 6000, 6000]
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers = inner, inner.numbers
        self.stopwatch: Stopwatch | None = None
        self._tallies: defaultdict[Operation, Tally] = defaultdict(Tally)

    @property
    def traffic(self) -> dict[Operation, Traffic]:
        return {operation: tally.traffic() for operation, tally in self._tallies.items()}

    def pop_traffic(self) -> dict[Operation, Traffic]:
        """The traffic since the last call; counting starts again from zero."""
        popped, self._tallies = self.traffic, defaultdict(Tally)
        return popped

    def payload(self) -> Traffic:
        """The sum of all traffic but control traffic."""
        return total(self.traffic, lambda operation: not operation.control)

    def control(self) -> Traffic:
        """The sum of all control traffic."""
        return total(self.traffic, lambda operation: operation.control)

    def tally(self, operation: Operation) -> Tally:
        """Where the traffic of `operation` is counted."""
        return self._tallies[operation]

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        pending = self.inner.post_send(message, peer, operation)
        self.tally(operation).sent(message.numel())
        return pending

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return _MeteredReceive(self, self.inner.post_recv(capacity, peer, operation), operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        with _Timed(self, operation, nullcontext()):  # the inner one measures itself
            self.inner.all_reduce_(x, phase, control=control)
        self.tally(operation).add(ring(x.nbytes, self.world))

    def begin_all_reduce(self, x: Tensor, phase: str, *, control: bool = False) -> PendingSum:
        """As Communicator.begin_all_reduce. Bytes and blocked time are counted when wait() returns: until then
        another thread may be counting an operation of its own."""
        start = time.perf_counter()
        pending = self.inner.begin_all_reduce(x, phase, control=control)
        moved = ring(x.nbytes, self.world, time.perf_counter() - start)
        return _MeteredSum(self, pending, Operation("all_reduce", phase, control), moved)

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

    def __exit__(self, *exception: Any) -> None:
        self.inner.__exit__(*exception)
        if self.stage is not None:
            self.stage.__exit__(*exception)
        self.meter.tally(self.operation).seconds += time.perf_counter() - self.start


class _MeteredReceive:
    def __init__(self, meter: Metered, pending: Pending, operation: Operation) -> None:
        self.meter, self.pending, self.operation = meter, pending, operation

    def wait(self, deadline: float) -> Tensor:
        message = self.pending.wait(deadline)
        self.meter.tally(self.operation).received(message.numel())
        return message


class _MeteredSum:
    def __init__(self, meter: Metered, pending: PendingSum, operation: Operation, moved: Traffic) -> None:
        self.meter, self.pending, self.operation, self.moved = meter, pending, operation, moved

    def wait(self) -> None:
        with _Timed(self.meter, self.operation, nullcontext()):  # the inner one measures itself
            self.pending.wait()
        self.meter.tally(self.operation).add(self.moved)
