"""Ranks as threads of one process: for tests, notebooks and simulation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import Aborted, CommError, CommTimeout
from ..metrics.traffic import Operation
from .base import DEFAULT_TIMEOUT, Communicator, interrupted, seconds_until, trim

T = TypeVar("T")
_FAREWELL = 5.0
"""Seconds to wait for ranks that are busy with something else when an interrupt ends them."""


class _Mailbox:
    """The messages on their way to one rank."""

    def __init__(self, world: int) -> None:
        self.changed = threading.Condition()
        self.queues: list[deque[Tensor]] = [deque() for _ in range(world)]
        self.sums: list[deque[Tensor]] = [deque() for _ in range(world)]
        """What belongs to an all_reduce_, as other transports keep it apart too."""

    def queue(self, peer: int, operation: Operation) -> deque[Tensor]:
        return (self.sums if operation.name == "all_reduce" else self.queues)[peer]


class _World:
    """What the ranks share: a mailbox each, and the first failure."""

    def __init__(self, size: int, in_turns: bool = False) -> None:
        self.boxes = [_Mailbox(size) for _ in range(size)]
        self.turn = threading.Lock() if in_turns else None
        self.waits_for: dict[int, int] = {}
        """Also of ranks that have waited in vain."""
        self.failed: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()

    def abort(self, rank: int, error: BaseException) -> None:
        """Wake everybody up; the first failure is the one that counts."""
        with self._lock:
            self.failed = self.failed or (rank, error)
        for box in self.boxes:
            with box.changed:
                box.changed.notify_all()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Let others have their turn meanwhile."""
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def missed(self, rank: int, peer: int) -> int:
        """Who is missing when a rank waits for a peer: that may wait for somebody itself, and so on."""
        waits_for, found, seen = dict(self.waits_for), peer, {rank}
        while found not in seen and found in waits_for:
            seen.add(found)
            found = waits_for[found]
        return peer if found in seen else found  # if they wait for each other

    def check(self, operation: Operation) -> None:
        if self.failed is not None:
            rank, error = self.failed
            who = f"rank {rank} failed" if rank >= 0 else "the caller was interrupted"
            raise Aborted(f"{operation}: given up because {who}: {error!r}")


class _Sent:
    def __init__(self, message: Tensor) -> None:
        self.message = message

    def wait(self, deadline: float) -> Tensor:
        return self.message


class _Receiving:
    def __init__(self, comm: ThreadCommunicator, capacity: int, peer: int, operation: Operation) -> None:
        self.comm, self.capacity, self.peer, self.operation = comm, capacity, peer, operation

    def wait(self, deadline: float) -> Tensor:
        message = self.comm.take(self.peer, deadline, self.operation)
        return trim(message[: self.capacity], self.peer, self.operation)


class ThreadCommunicator(Communicator):
    """One rank of a world of threads."""

    def __init__(self, shared: _World, rank: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        super().__init__(rank, len(shared.boxes), timeout)
        self._shared = shared
        self._interrupted = False

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Sent:
        self._shared.check(operation)
        # A copy, because the sender may reuse its buffer, as with a real network. By NumPy, which keeps the GIL:
        # with many threads, giving it up for every small operation costs more than the operation.
        self._put(torch.from_numpy(message.numpy().copy()), peer, operation)
        return _Sent(message)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Receiving:
        return _Receiving(self, capacity, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        """Rank 0 adds up in rank order and hands out the sum."""
        operation = Operation("all_reduce", phase, control)
        self._shared.check(operation)
        deadline = self._deadline()
        if self.rank:
            self._put(x.clone(), 0, operation)
            x.copy_(self.take(0, deadline, operation))
            return
        for peer in range(1, self.world):
            theirs = self.take(peer, deadline, operation)
            if theirs.shape != x.shape or theirs.dtype != x.dtype:
                raise CommError(f"{operation}: rank {peer} has {tuple(theirs.shape)}, rank 0 {tuple(x.shape)}")
            x += theirs
        for peer in range(1, self.world):
            self._put(x.clone(), peer, operation)

    def fail(self, error: BaseException) -> None:
        self._shared.abort(self.rank, error)

    def interrupt(self) -> None:
        self._interrupted = True
        box = self._shared.boxes[self.rank]
        with box.changed:
            box.changed.notify_all()

    def _put(self, message: Tensor, peer: int, operation: Operation) -> None:
        box = self._shared.boxes[peer]
        with box.changed:
            box.queue(self.rank, operation).append(message)
            box.changed.notify_all()

    def take(self, peer: int, deadline: float, operation: Operation) -> Tensor:
        box = self._shared.boxes[self.rank]
        queue = box.queue(peer, operation)
        if queue:  # nobody else takes from it
            return queue.popleft()
        self._shared.waits_for[self.rank] = peer
        with self._shared.idle(), box.changed:
            box.changed.wait_for(
                lambda: queue or self._shared.failed or self._interrupted,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if queue:
                self._shared.waits_for.pop(self.rank, None)
                return queue.popleft()
        self._shared.check(operation)
        if self._interrupted:
            raise CommError(interrupted(operation))
        missed, seconds = self._shared.missed(self.rank, peer), seconds_until(deadline, self.timeout)
        raise CommTimeout(f"{operation}: no message from rank {missed} within {seconds:g} s")


def alone() -> ThreadCommunicator:
    """The only rank of a world of one."""
    return ThreadCommunicator(_World(1), 0)


def run_threads(
    world: int, fn: Callable[[Communicator], T], timeout: float = 60.0, *, in_turns: bool = False
) -> list[T]:
    """Call fn(comm) on `world` ranks, each a thread of this process; the results in rank order.

    A rank that raises ends all the others at their next communication, and its error is raised here. With
    `in_turns`, one rank runs at a time, until it waits: hundreds of threads get more done if they do not quarrel.

    >>> import torch
    >>> def total(comm):
    ...     x = torch.tensor([float(comm.rank)])
    ...     comm.all_reduce_(x, "example")
    ...     return x.item()
    >>> run_threads(3, total)
    [3.0, 3.0, 3.0]
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    shared = _World(world, in_turns)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            with shared.turn or nullcontext():
                if shared.turn is None or shared.failed is None:  # nobody begins after the end
                    results[rank] = fn(ThreadCommunicator(shared, rank, timeout))
        except BaseException as error:  # handed to the caller below, whatever it is
            shared.abort(rank, error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"oktopk-rank-{rank}", daemon=True)
        for rank in range(world)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as interrupt:  # Ctrl-C, for one: end the ranks before it goes on
        shared.abort(-1, interrupt)
        deadline = time.monotonic() + _FAREWELL
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if shared.failed is not None:
        rank, error = shared.failed
        if world > 1 and hasattr(error, "add_note"):
            error.add_note(f"raised on rank {rank} of {world}")
        raise error
    return [results[rank] for rank in range(world)]
