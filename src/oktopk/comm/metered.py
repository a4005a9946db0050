"""Metered: a communicator that counts what it sends, receives and waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from ..stopwatch import Stopwatch
from .base import Communicator, Operation, Pending


@dataclass(frozen=True)
class Traffic:
    """What one kind of operation moved. Sizes are counted by powers of two: sizes[b] messages of [2^b, 2^(b+1)).

    `modelled` marks a library collective, whose inside cannot be seen: its bytes and messages are those of the
    ring algorithm, not counts.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    seconds: float = 0.0
    modelled: bool = False
    sizes: dict[int, int] = field(default_factory=dict)

    def __add__(self, other: Traffic) -> Traffic:
        sizes = dict(self.sizes)
        for bin_, count in other.sizes.items():
            sizes[bin_] = sizes.get(bin_, 0) + count
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.sent_messages + other.sent_messages,
            self.received_messages + other.received_messages,
            self.seconds + other.seconds,
            self.modelled or other.modelled,
            sizes,
        )


def total(traffic: dict[Operation, Traffic], chosen: Callable[[Operation], bool] = lambda _: True) -> Traffic:
    """The sum over the chosen operations."""
    return sum((t for operation, t in traffic.items() if chosen(operation)), Traffic())


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
        self._add(operation, Traffic(moved, moved, messages, messages, modelled=True))

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
