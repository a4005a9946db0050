"""What a transport is, and the ragged collectives that all of them share.

A *message* is a 1-D uint8 CPU tensor whose first eight bytes hold its own length, little-endian. A transport
that cannot tell how much has arrived reads it there, so that a receive needs no size exchanged beforehand: it
is posted with a capacity, an upper bound that every rank knows.

A transport implements three primitives: post_send, post_recv and all_reduce_. Everything else is built on
them here, once; a decorator that counts or disturbs messages wraps the same three.
"""

from __future__ import annotations

import itertools
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from ..errors import CommError, WireError
from ..metrics.traffic import Operation
from .control import seal, sealed_bytes, unseal

DEFAULT_TIMEOUT = 300.0
LENGTH = struct.Struct("<Q")
"""How a message begins."""
ROOM = 1 << 20
"""Bytes that every receive has room for, whatever its capacity. When a message was lost, the next one comes to its
receive; then its length gives it away. gloo ends the process if a message is larger than the receive."""
_WINDOW = 8
"""How many pairs of an all-to-all are in flight at once: enough to keep the link busy while one is summed."""

_MANY = 4


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self, deadline: float) -> Tensor:
        """Block until done or until time.monotonic() passes the deadline; a receive gives its message."""
        ...


class Deadline(float):
    """A moment of time.monotonic() that knows how long there was until then."""

    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        deadline = cls(time.monotonic() + seconds)
        deadline.seconds = seconds
        return deadline


def seconds_until(deadline: float, otherwise: float) -> float:
    """How long somebody had who has met its deadline: it may be more patient than its communicator."""
    return deadline.seconds if isinstance(deadline, Deadline) else otherwise


def listed(ranks: Sequence[int]) -> str:
    """Ranks by name; of many, the first few."""
    names = [f"rank {rank}" for rank in ranks[:_MANY]]
    if len(ranks) > _MANY:
        names.append(f"{len(ranks) - _MANY} others")
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def interrupted(operation: Operation) -> str:
    return f"{operation}: the communicator has been closed in the middle of it"


def pack(*payloads: Tensor) -> Tensor:
    """Any 1-D tensors, end to end, as one message."""
    bodies = [payload.contiguous().view(torch.uint8).numpy() for payload in payloads]
    message = np.empty(LENGTH.size + sum(body.size for body in bodies), np.uint8)
    LENGTH.pack_into(message.data, 0, message.size)
    np.concatenate(bodies, out=message[LENGTH.size :])
    return torch.from_numpy(message)


def unpack(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The payload of a packed message."""
    body = message[LENGTH.size :]
    if body.numel() % dtype.itemsize:
        raise WireError(f"a packed message of {body.numel()} bytes does not hold {dtype}")
    return body.clone().view(dtype)


def packed_bytes(payload_bytes: int) -> int:
    return LENGTH.size + payload_bytes


def trim(buffer: Tensor, peer: int, operation: Operation) -> Tensor:
    """The message at the start of a receive buffer."""
    length = LENGTH.unpack_from(buffer.numpy().data)[0] if buffer.numel() >= LENGTH.size else 0
    if not LENGTH.size <= length <= buffer.numel():
        raise WireError(f"{operation}: the message from rank {peer} says {length} of {buffer.numel()} bytes")
    return buffer[:length]


def _lay_end_to_end(messages: Sequence[Tensor]) -> Tensor:
    return messages[0] if len(messages) == 1 else pack(*messages)


def _take_apart(message: Tensor, count: int, peer: int, operation: Operation) -> list[Tensor]:
    if count == 1:
        return [message]
    rest = message[LENGTH.size :]
    parts = []
    for _ in range(count):
        parts.append(trim(rest, peer, operation))
        rest = rest[parts[-1].numel() :]
    if rest.numel():
        raise WireError(f"{operation}: {rest.numel()} bytes too many from rank {peer}")
    return parts


class Communicator(ABC):
    """One rank's connection to the others. Every operation is collective, blocking, and bounded by `timeout`.

    What was posted may move only while somebody waits for a message: between posting and waiting there must be no
    other collective, like a sum.
    """

    def __init__(self, rank: int, world: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.numbers = itertools.count()
        """Of sealed operations. What wraps a communicator shares its numbers."""

    # What a transport provides. Messages between two ranks arrive in the order they were posted.

    @abstractmethod
    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending: ...

    @abstractmethod
    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending: ...

    @abstractmethod
    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        """Sum x over all ranks, in place; the same bits on every rank."""

    def known_as(self, rank: int) -> int:
        """What everybody calls a rank: in messages, and in errors about them."""
        return rank

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        """Entered around each operation below; Metered takes its time here."""
        return nullcontext()

    def fail(self, error: BaseException) -> None:  # noqa: B027 - a transport without a back channel times out
        """Tell the other ranks that this one has given up. It must not be used afterwards."""

    def interrupt(self) -> None:  # noqa: B027 - where waits cannot be woken, they end with their timeout
        """Wake another thread that waits for ranks here, by an error. It must not be used afterwards."""

    def close(self) -> None:  # noqa: B027 - most transports have nothing to release
        """Give back what the communicator holds. It must not be used afterwards."""

    # What everybody gets.

    def _deadline(self, timeout: float | None = None) -> Deadline:
        return Deadline.after(self.timeout if timeout is None else timeout)

    @final
    def send(self, message: Tensor, peer: int, phase: str, *, control: bool = False) -> None:
        operation = Operation("send", phase, control)
        with self.measure(operation):
            self.post_send(message, peer, operation).wait(self._deadline())

    @final
    def recv(
        self, capacity: int, peer: int, phase: str, *, control: bool = False, timeout: float | None = None
    ) -> Tensor:
        operation = Operation("recv", phase, control)
        with self.measure(operation):
            return self.post_recv(capacity, peer, operation).wait(self._deadline(timeout))

    @final
    def broadcast(self, message: Tensor | None, capacity: int, phase: str, *, control: bool = False) -> Tensor:
        """Rank 0's message, on every rank, along a binomial tree: ceil(log2 P) messages in a row.

        P = 5:   0 -> 1   then   0 -> 2, 1 -> 3   then   0 -> 4
        """
        operation = Operation("broadcast", phase, control)
        deadline = self._deadline()
        with self.measure(operation):
            first = 1  # the distance at which this rank starts to pass the message on
            if self.rank:
                first = 1 << self.rank.bit_length()
                message = self.post_recv(capacity, self.rank - first // 2, operation).wait(deadline)
            if message is None:
                raise CommError(f"{operation}: rank {self.known_as(0)} has no message to broadcast")
            self._check_fits(message, capacity, operation)
            sends = []
            while self.rank + first < self.world:
                sends.append(self.post_send(message, self.rank + first, operation))
                first *= 2
            for pending in sends:
                pending.wait(deadline)
            return message

    @final
    def all_gather(self, message: Tensor, capacity: int, phase: str, *, control: bool = False) -> list[Tensor]:
        """Everybody's message, in rank order, of whatever length up to `capacity` (Bruck's algorithm).

        ceil(log2 P) messages per rank, and no byte is received twice. After the exchange at distance d, rank r
        holds the messages of r, r+1, …, r+2d-1; the last exchange passes only what is still missing.

            P = 5, rank 0 holds:   0   ->   0 1   ->   0 1 2 3   ->   0 1 2 3 4
            and sends              0 to 4,   0 1 to 3,   0 to 1
        """
        operation = Operation("all_gather", phase, control)
        self._check_fits(message, capacity, operation)
        deadline = self._deadline()
        with self.measure(operation):
            held = [message]
            while len(held) < self.world:
                distance = len(held)
                batch = min(distance, self.world - distance)
                to, source = (self.rank - distance) % self.world, (self.rank + distance) % self.world
                room = capacity if batch == 1 else packed_bytes(batch * capacity)
                incoming = self.post_recv(room, source, operation)
                sending = self.post_send(_lay_end_to_end(held[:batch]), to, operation)
                held += _take_apart(incoming.wait(deadline), batch, self.known_as(source), operation)
                sending.wait(deadline)
            return [held[(r - self.rank) % self.world] for r in range(self.world)]

    @final
    def exchange(
        self,
        messages: Sequence[Tensor | None],
        capacity: int,
        phase: str,
        *,
        sources: Sequence[bool] | None = None,
        control: bool = False,
    ) -> Iterator[tuple[int, Tensor]]:
        """Send messages[j] to each rank j and yield (source, its message), in the order r-1, r-2, …

        Step i sends to r+i and receives from r-i, so that nobody is hit by all at once, and a few steps are in
        flight while the caller works on one. A None is not sent; then `sources` says who sends to this rank.
        """
        operation = Operation("all_to_all", phase, control)
        for message in messages:
            if message is not None:
                self._check_fits(message, capacity, operation)
        deadline = self._deadline()
        receives: dict[int, Pending] = {}
        sends: list[Pending] = []

        def post(step: int) -> None:
            to, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            if sources is None or sources[source]:
                receives[source] = self.post_recv(capacity, source, operation)
            outgoing = messages[to]
            if outgoing is not None:
                sends.append(self.post_send(outgoing, to, operation))

        with self.measure(operation):
            for step in range(1, min(_WINDOW, self.world)):
                post(step)
        for step in range(1, self.world):
            source = (self.rank - step) % self.world
            with self.measure(operation):
                if step + _WINDOW - 1 < self.world:
                    post(step + _WINDOW - 1)
                arrived = receives.pop(source).wait(deadline) if source in receives else None
            if arrived is not None:
                yield source, arrived
        with self.measure(operation):
            for pending in sends:
                pending.wait(deadline)

    @final
    def all_to_all(
        self, messages: Sequence[Tensor], capacity: int, phase: str, *, control: bool = False
    ) -> list[Tensor]:
        """messages[j] goes to rank j; the result has what each rank sent here, in rank order."""
        received = dict(self.exchange(messages, capacity, phase, control=control))
        received[self.rank] = messages[self.rank]
        return [received[r] for r in range(self.world)]

    @final
    def all_gather_ints(
        self, numbers: Sequence[int], phase: str, dtype: torch.dtype = torch.int64
    ) -> list[list[int]]:
        """A few integers of every rank, in rank order: control traffic."""
        told = torch.tensor(list(numbers), dtype=dtype)
        return [heard.tolist() for heard in self.all_gather_sealed(told, told.nbytes, phase)]

    @final
    def all_gather_sealed(self, payload: Tensor, capacity: int, phase: str) -> list[Tensor]:
        """Everybody's payload, in host memory and of up to `capacity` bytes, in rank order: control traffic."""
        number, operation = next(self.numbers), Operation("all_gather", phase, control=True)
        message = seal(payload, self.known_as(self.rank), number, operation)
        gathered = self.all_gather(message, sealed_bytes(capacity), phase, control=True)
        return [
            payload if rank == self.rank else unseal(heard, self.known_as(rank), number, operation, payload.dtype)
            for rank, heard in enumerate(gathered)
        ]

    @final
    def broadcast_sealed(self, payload: Tensor | None, capacity: int, phase: str) -> Tensor:
        """Rank 0's bytes, on every rank."""
        number, operation = next(self.numbers), Operation("broadcast", phase)
        message = None if payload is None else seal(payload, self.known_as(0), number, operation)
        heard = self.broadcast(message, sealed_bytes(capacity), phase)
        return unseal(heard, self.known_as(0), number, operation, torch.uint8)

    def _check_fits(self, message: Tensor, capacity: int, operation: Operation) -> None:
        if message.numel() > capacity:
            raise CommError(f"{operation}: a message of {message.numel()} bytes for a capacity of {capacity}")


class Wrapped(Communicator):
    """A communicator over another one, `inner`: what concerns no single message goes there as it is."""

    inner: Communicator

    def known_as(self, rank: int) -> int:
        return self.inner.known_as(rank)

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        return self.inner.measure(operation)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()
