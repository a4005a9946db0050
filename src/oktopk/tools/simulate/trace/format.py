"""Record what one rank does in a step, as its communicator sees it: messages, waits, and the work in between.

`RecordingCommunicator` wraps any communicator. An event is six integers, so that a million messages fit into
memory.

    SEND       peer, bytes, parts, entries, span     parts of the wire format in the message, their entries, and
    the
                                                     total length of their regions
    CONTROL    peer, bytes                           a message whose size does not grow with the tensor
    RECEIVE    peer                                  wait for the next message of that peer
    FLUSH      number                                wait until that send of the step has left
    RING       entries, bytes of one, control        the library's all-reduce
    ENCODE     parts, entries                        work, with prices measured elsewhere
    DECODE     parts, entries
    ADD        0, entries                            entries of sparse vectors added to the result
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from oktopk.comm import Communicator, Pending, Wrapped
from oktopk.metrics.traffic import Operation
from oktopk.wire.message import HEADER_BYTES, outline

SEND, CONTROL, RECEIVE, FLUSH, RING, ENCODE, DECODE, ADD = range(8)
WORK = (ENCODE, DECODE, ADD)
FIELDS = 6
"""Integers per event: its kind and five values."""

_LENGTH_BYTES = 8
"""What comes before the first of several parts: the length of all of them."""

_ENCODED_ONCE = ("all_gather", "broadcast")
"""Operations that encode a message once and send it several times."""

_MERGED = ("recv",)
"""Operations whose message is merged into the receiver's data."""

Part = tuple[int, int, int]
"""Sender, entries, span."""


class Trace:
    """The events of one rank in one step, in order."""

    def __init__(self) -> None:
        self.numbers = array("q")

    def add(self, kind: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0) -> int:
        """Add an event; returns its position."""
        place = len(self.numbers)
        self.numbers.extend((kind, a, b, c, d, e))
        return place

    def add_work(self, place: int, parts: int, entries: int) -> None:
        """Add work to an existing event."""
        self.numbers[place + 1] += parts
        self.numbers[place + 2] += entries

    def events(self) -> Iterator[tuple[int, ...]]:
        flat = iter(self.numbers)
        return zip(*[flat] * FIELDS, strict=True)


def parts_of(message: Tensor) -> list[Part]:
    """The parts of a message in the wire format, one or several; empty for another kind of message."""
    data = message.numpy().data
    parts, at = [], 0 if outline(data, 0) else _LENGTH_BYTES
    while found := outline(data, at):
        parts.append((found.sender, found.entries, found.span))
        at += max(HEADER_BYTES, found.length)
    return parts


class RecordingCommunicator(Wrapped):
    """Wraps a communicator and records its events; take() returns those since the last call."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner = inner
        self._trace, self._sends = Trace(), 0
        self._operation: Operation | None = None
        self._encoding, self._encoded = 0, False
        self._to_decode = [0, 0]

    def take(self) -> Trace:
        taken, self._trace, self._sends, self._operation = self._trace, Trace(), 0, None
        return taken

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        parts = [] if operation.control else parts_of(message)
        own = [entries for sender, entries, _ in parts if sender == self.rank]
        self._begin(operation)
        if not (self._encoded and operation.name in _ENCODED_ONCE):
            self._trace.add_work(self._encoding, len(own), sum(own))
            self._encoded = self._encoded or bool(own)
        if operation.control:
            self._trace.add(CONTROL, peer, message.numel())
        else:
            entries, span = sum(part[1] for part in parts), sum(part[2] for part in parts)
            self._trace.add(SEND, peer, message.numel(), len(parts), entries, span)
        self._sends += 1
        return _Sending(self, self.inner.post_send(message, peer, operation), self._sends - 1)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        self._begin(operation)
        return _Receiving(self, self.inner.post_recv(capacity, peer, operation), peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        self._trace.add(RING, x.numel(), x.element_size(), control)
        self._operation = None
        self.inner.all_reduce_(x, phase, control=control)

    @contextmanager
    def measure(self, operation: Operation) -> Iterator[None]:
        """Record decoding after an operation, not between its messages."""
        with self.inner.measure(operation):
            yield
        if any(self._to_decode):
            self._trace.add(DECODE, *self._to_decode)
            if operation.name in _MERGED:
                self.record_add(self._to_decode[1])
            self._to_decode = [0, 0]
        if operation.name in _ENCODED_ONCE:
            self._operation = None

    def record_receive(self, message: Tensor, peer: int, operation: Operation) -> None:
        self._trace.add(RECEIVE, peer)
        for _, entries, _ in [] if operation.control else parts_of(message):
            self._to_decode[0] += 1
            self._to_decode[1] += entries

    def record_add(self, entries: int) -> None:
        self._trace.add(ADD, 0, entries)

    def record_flush(self, number: int) -> None:
        self._trace.add(FLUSH, number)

    def _begin(self, operation: Operation) -> None:
        """Start an operation; it encodes all its messages before it sends the first."""
        if operation != self._operation:
            self._operation, self._encoded = operation, False
            self._encoding = self._trace.add(ENCODE, 0, 0)


class _Sending:
    def __init__(self, comm: RecordingCommunicator, pending: Pending, number: int) -> None:
        self.comm, self.pending, self.number = comm, pending, number

    def wait(self, deadline: float) -> Tensor:
        self.comm.record_flush(self.number)
        return self.pending.wait(deadline)


class _Receiving:
    def __init__(self, comm: RecordingCommunicator, pending: Pending, peer: int, operation: Operation) -> None:
        self.comm, self.pending, self.peer, self.operation = comm, pending, peer, operation

    def wait(self, deadline: float) -> Tensor:
        message = self.pending.wait(deadline)
        self.comm.record_receive(message, self.peer, self.operation)
        return message
