"""What a communicator is: a transport, and the ragged collectives that are built on it here, once.

A decorator that counts or disturbs messages wraps the primitives of the transport.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from ..errors import CommError, WireError
from ..metrics.traffic import Operation
from ..utils.timeouts import Deadline
from .messages import join_messages, packed_bytes, seal, sealed_bytes, split_messages, unseal
from .transport import Pending, Transport

if TYPE_CHECKING:
    from .fixed import FixedCollectives

_WINDOW = 8
"""How many pairs of an all-to-all are in flight at once: enough to keep the link busy while one is summed."""


class Communicator(Transport):
    """One rank's connection to the others. Every operation is collective, blocking, and bounded by `timeout`.

    Messages may move only while a thread waits for one: between posting a message and waiting for it there must be
    no other collective, such as a sum.

    Args:
        rank: This rank.
        world: How many ranks there are.
        timeout: Seconds that an operation may take.

    >>> from oktopk import run_threads
    >>> import torch
    >>> def gather(comm):
    ...     mine = torch.tensor([comm.rank, comm.rank**2])
    ...     return [theirs.tolist() for theirs in comm.all_gather_sealed(mine, 16, "squares")]
    >>> run_threads(3, gather)[0]
    [[0, 0], [1, 1], [2, 4]]
    """

    def global_rank(self, rank: int) -> int:
        """The number that `rank` has among all ranks: in messages, and in errors about them."""
        return rank

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        """A context that is entered around each operation below; Metered takes the time of `operation` there."""
        return nullcontext()

    def _deadline(self, timeout: float | None = None) -> Deadline:
        seconds = self.timeout if timeout is None else timeout
        deadline = Deadline(time.monotonic() + seconds)
        deadline.seconds = seconds
        return deadline

    def device_collectives(self, device: torch.device) -> FixedCollectives | None:
        """Collectives on tensors of a device that its backend does there; None if there are none."""
        return None

    @final
    def send(self, message: Tensor, peer: int, phase: str, *, control: bool = False) -> None:
        """Send a message to one rank, which calls recv().

        Args:
            message: A message as `pack` makes it.
            peer: The rank that receives it.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.
        """
        operation = Operation("send", phase, control)
        with self.measure(operation):
            self.post_send(message, peer, operation).wait(self._deadline())

    @final
    def recv(
        self, capacity: int, peer: int, phase: str, *, control: bool = False, timeout: float | None = None
    ) -> Tensor:
        """Receive the next message from one rank.

        Args:
            capacity: The bytes that it may have at most.
            peer: The rank that sends it.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.
            timeout: Seconds to wait, instead of the communicator's.
        """
        operation = Operation("recv", phase, control)
        with self.measure(operation):
            return self.post_recv(capacity, peer, operation).wait(self._deadline(timeout))

    @final
    def broadcast(self, message: Tensor | None, capacity: int, phase: str, *, control: bool = False) -> Tensor:
        """Rank 0's message, on every rank, along a binomial tree: ceil(log2 P) messages in a row.

            P = 5:   0 -> 1   then   0 -> 2, 1 -> 3   then   0 -> 4

        Args:
            message: The message on rank 0; other ranks pass None.
            capacity: The bytes that it may have at most.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.
        """
        operation = Operation("broadcast", phase, control)
        deadline = self._deadline()
        with self.measure(operation):
            first = 1  # the distance at which this rank starts to pass the message on
            if self.rank:
                first = 1 << self.rank.bit_length()
                message = self.post_recv(capacity, self.rank - first // 2, operation).wait(deadline)
            if message is None:
                raise CommError(f"{operation}: rank {self.global_rank(0)} has no message to broadcast")
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
        """The messages of all ranks, in rank order, of any lengths (Bruck's algorithm).

        ceil(log2 P) messages per rank, and no byte is received twice. After the exchange at distance d, rank r
        holds the messages of r, r+1, …, r+2d-1; the last exchange passes only what is still missing.

            P = 5, rank 0 holds:   0   ->   0 1   ->   0 1 2 3   ->   0 1 2 3 4
            and sends              0 to 4,   0 1 to 3,   0 to 1

        Args:
            message: The message of this rank.
            capacity: The bytes that a message may have at most.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.
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
                sending = self.post_send(join_messages(held[:batch]), to, operation)
                held += split_messages(incoming.wait(deadline), batch, self.global_rank(source), operation)
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
        """Send messages[j] to each rank j; returns an iterator of (source, its message), in the order r-1, r-2, …

        Step i sends to r+i and receives from r-i, so that no rank gets all messages at once. A few steps are under
        way when this returns, and while the caller works on a message. The iterator must be used up.

        Args:
            messages: One for each rank; None is not sent.
            capacity: The bytes that a message may have at most.
            phase: Names the traffic, for the meter and in errors.
            sources: Which ranks send to this one; by default all.
            control: Whether it is control traffic, which is counted apart.
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

        def arrivals() -> Iterator[tuple[int, Tensor]]:
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

        with self.measure(operation):
            for step in range(1, min(_WINDOW, self.world)):
                post(step)
        return arrivals()

    @final
    def all_to_all(
        self, messages: Sequence[Tensor], capacity: int, phase: str, *, control: bool = False
    ) -> list[Tensor]:
        """Send messages[j] to each rank j; returns what each rank sent here, in rank order.

        Args:
            messages: One for each rank.
            capacity: The bytes that a message may have at most.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.
        """
        received = dict(self.exchange(messages, capacity, phase, control=control))
        received[self.rank] = messages[self.rank]
        return [received[r] for r in range(self.world)]

    @final
    def all_gather_ints(
        self, numbers: Sequence[int], phase: str, dtype: torch.dtype = torch.int64
    ) -> list[list[int]]:
        """A few integers of every rank, in rank order: control traffic.

        Args:
            numbers: Those of this rank; as many on every rank.
            phase: Names the traffic, for the meter and in errors.
            dtype: The type in which they travel.
        """
        mine = torch.tensor(list(numbers), dtype=dtype)
        gathered = [theirs.tolist() for theirs in self.all_gather_sealed(mine, mine.nbytes, phase)]
        for rank, theirs in enumerate(gathered):
            if len(theirs) != len(numbers):
                raise WireError(
                    f"all_gather ({phase}): {len(theirs)} numbers from rank {self.global_rank(rank)}, "
                    f"expected {len(numbers)}"
                )
        return gathered

    @final
    def all_gather_sealed(self, payload: Tensor, capacity: int, phase: str) -> list[Tensor]:
        """The tensors of all ranks, in rank order, with checksums: control traffic.

        Args:
            payload: A 1-D tensor in host memory, of one type on all ranks.
            capacity: The bytes that a payload may have at most.
            phase: Names the traffic, for the meter and in errors.
        """
        number, operation = next(self.numbers), Operation("all_gather", phase, control=True)
        message = seal(payload, self.global_rank(self.rank), number, operation)
        gathered = self.all_gather(message, sealed_bytes(capacity), phase, control=True)
        return [
            payload if r == self.rank else unseal(sealed, self.global_rank(r), number, operation, payload.dtype)
            for r, sealed in enumerate(gathered)
        ]

    @final
    def broadcast_sealed(self, payload: Tensor | None, capacity: int, phase: str) -> Tensor:
        """Rank 0's bytes, on every rank, with a checksum.

        Args:
            payload: A 1-D tensor in host memory on rank 0; other ranks pass None.
            capacity: The bytes that it may have at most.
            phase: Names the traffic, for the meter and in errors.
        """
        number, operation = next(self.numbers), Operation("broadcast", phase)
        message = None if payload is None else seal(payload, self.global_rank(0), number, operation)
        sealed = self.broadcast(message, sealed_bytes(capacity), phase)
        return unseal(sealed, self.global_rank(0), number, operation, torch.uint8)

    def _check_fits(self, message: Tensor, capacity: int, operation: Operation) -> None:
        if message.numel() > capacity:
            raise CommError(f"{operation}: a message of {message.numel()} bytes for a capacity of {capacity}")


class Wrapped(Communicator):
    """A communicator over another one, `inner`: whatever concerns no single message is passed on."""

    inner: Communicator

    def global_rank(self, rank: int) -> int:
        return self.inner.global_rank(rank)

    def device_collectives(self, device: torch.device) -> FixedCollectives | None:
        return self.inner.device_collectives(device)

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        return self.inner.measure(operation)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()
