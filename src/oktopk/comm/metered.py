"""Metered: a communicator that counts what it sends, receives and waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor

from ..stopwatch import Stopwatch
from ..traffic import Operation, Traffic, total
from .base import Communicator, Pending


class Metered(Communicator):
    """Wraps any communicator; `traffic` has one entry per operation and phase."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner = inner
        self.stopwatch: Stopwatch | None = None
        """If set, the time of every operation is noted there too."""
        self.traffic: dict[Operation, Traffic] = {}

    def take(self) -> dict[Operation, Traffic]:
        """The traffic since the last call."""
        taken, self.traffic = self.traffic, {}
        return taken

    def payload(self) -> Traffic:
        return total(self.traffic, lambda operation: not operation.control)

    def control(self) -> Traffic:
        return total(self.traffic, lambda operation: operation.control)

    def _add(self, operation: Operation, traffic: Traffic) -> None:
        self.traffic[operation] = self.traffic.get(operation, Traffic()) + traffic

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        size = message.numel()
        pending = self.inner.post_send(message, peer, operation)
        sizes = {max(size, 1).bit_length() - 1: 1}
        self._add(operation, Traffic(sent_bytes=size, sent_messages=1, sizes=sizes))
        return pending

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return _CountedReceive(self, self.inner.post_recv(capacity, peer, operation), operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        with self._timed(operation):  # the inner one measures itself
            self.inner.all_reduce_(x, phase, control=control)
        moved = 2 * x.numel() * x.element_size() * (self.world - 1) // self.world
        messages = 2 * (self.world - 1)
        sizes = {max(1, moved // messages).bit_length() - 1: messages} if messages else {}
        self._add(operation, Traffic(moved, moved, messages, messages, modelled=True, sizes=sizes))

    @contextmanager
    def measure(self, operation: Operation) -> Iterator[None]:
        with self._timed(operation), self.inner.measure(operation):
            yield

    @contextmanager
    def _timed(self, operation: Operation) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with nullcontext() if self.stopwatch is None else self.stopwatch.stage("exchange"):
                yield
        finally:
            self._add(operation, Traffic(seconds=time.perf_counter() - start))

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def close(self) -> None:
        self.inner.close()


class _CountedReceive:
    def __init__(self, meter: Metered, pending: Pending, operation: Operation) -> None:
        self.meter, self.pending, self.operation = meter, pending, operation

    def wait(self, deadline: float) -> Tensor:
        message = self.pending.wait(deadline)
        self.meter._add(self.operation, Traffic(received_bytes=message.numel(), received_messages=1))
        return message
