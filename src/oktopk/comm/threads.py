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
from ..utils.timeouts import TIMEOUTS, seconds_until
from .base import Communicator
from .messages import trim
from .transport import INTERRUPTED

T = TypeVar("T")


class _Mailbox:
    """The messages on their way to one rank."""

    def __init__(self, world: int) -> None:
        self.changed = threading.Condition()
        self.queues: list[deque[Tensor]] = [deque() for _ in range(world)]
        self.sums: list[deque[Tensor]] = [deque() for _ in range(world)]
        """Those of an all_reduce_, which other transports keep apart too."""

    def queue(self, peer: int, operation: Operation) -> deque[Tensor]:
        return (self.sums if operation.name == "all_reduce" else self.queues)[peer]


class _World:
    """What the ranks share: a mailbox each, and the first failure."""

    def __init__(self, size: int, in_turns: bool = False) -> None:
        self.boxes = [_Mailbox(size) for _ in range(size)]
        self.turn = threading.Lock() if in_turns else None
        self.waits_for: dict[int, int] = {}
        """Also of ranks that have timed out."""
        self.failed: tuple[int, BaseException] | None = None
        self._lock = threading.RLock()  # a signal may come to the thread that holds it, and fail too

    def abort(self, rank: int, error: BaseException) -> None:
        """Wake all ranks; the first failure counts."""
        with self._lock:
            self.failed = self.failed or (rank, error)
        for box in self.boxes:
            with box.changed:
                box.changed.notify_all()

    @contextmanager
    def let_others_run(self) -> Iterator[None]:
        """Give up the turn for the block."""
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def find_missing(self, rank: int, peer: int) -> int:
        """The rank that is missing when a rank waits for a peer: that may wait for another one, and so on."""
        waits_for, found, seen = dict(self.waits_for), peer, {rank}
        while found not in seen and found in waits_for:
            seen.add(found)
            found = waits_for[found]
        return peer if found in seen else found  # if they wait for each other

    def check(self, operation: Operation) -> None:
        if self.failed is not None:
            rank, error = self.failed
            who = f"rank {rank} failed" if rank >= 0 else "the caller was interrupted"
            raise Aborted(f"{operation}: {who}: {error!r}")


class _Send:
    def __init__(self, message: Tensor) -> None:
        self.message = message

    def wait(self, deadline: float) -> Tensor:
        return self.message


class _Receive:
    def __init__(self, comm: ThreadCommunicator, capacity: int, peer: int, operation: Operation) -> None:
        self.comm, self.capacity, self.peer, self.operation = comm, capacity, peer, operation

    def wait(self, deadline: float) -> Tensor:
        message = self.comm.receive(self.peer, deadline, self.operation)
        return trim(message[: self.capacity], self.peer, self.operation)


class ThreadCommunicator(Communicator):
    """One rank of a world of threads."""

    def __init__(self, shared: _World, rank: int, timeout: float = TIMEOUTS.operation) -> None:
        super().__init__(rank, len(shared.boxes), timeout)
        self._shared = shared
        self._interrupted = False

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Send:
        self._shared.check(operation)
        # A copy, because the sender may reuse its buffer, as with a real network. By NumPy, which holds the GIL:
        # with many threads, releasing it for every small operation costs more than the operation.
        self._deliver(torch.from_numpy(message.numpy().copy()), peer, operation)
        return _Send(message)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Receive:
        return _Receive(self, capacity, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        """Rank 0 adds up in rank order and hands out the sum."""
        operation = Operation("all_reduce", phase, control)
        self._shared.check(operation)
        deadline = self._deadline()
        if self.rank:
            self._deliver(x.clone(), 0, operation)
            total = self.receive(0, deadline, operation)
            self._check_alike(x, total, 0, operation)
            x.copy_(total)
            return
        for peer in range(1, self.world):
            theirs = self.receive(peer, deadline, operation)
            self._check_alike(x, theirs, peer, operation)
            x += theirs
        for peer in range(1, self.world):
            self._deliver(x.clone(), peer, operation)

    def _check_alike(self, x: Tensor, theirs: Tensor, peer: int, operation: Operation) -> None:
        if theirs.shape != x.shape or theirs.dtype != x.dtype:
            raise CommError(
                f"{operation}: rank {peer} has {tuple(theirs.shape)}, rank {self.rank} {tuple(x.shape)}"
            )

    def fail(self, error: BaseException) -> None:
        self._shared.abort(self.rank, error)

    def interrupt(self) -> None:
        self._interrupted = True
        box = self._shared.boxes[self.rank]
        with box.changed:
            box.changed.notify_all()

    def _deliver(self, message: Tensor, peer: int, operation: Operation) -> None:
        box = self._shared.boxes[peer]
        with box.changed:
            box.queue(self.rank, operation).append(message)
            box.changed.notify_all()

    def receive(self, peer: int, deadline: float, operation: Operation) -> Tensor:
        """Wait for the next message from a peer."""
        box = self._shared.boxes[self.rank]
        queue = box.queue(peer, operation)
        if queue:  # no other thread reads it
            return queue.popleft()
        self._shared.waits_for[self.rank] = peer
        with self._shared.let_others_run(), box.changed:
            box.changed.wait_for(
                lambda: queue or self._shared.failed or self._interrupted,
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if queue:
                self._shared.waits_for.pop(self.rank, None)
                return queue.popleft()
        self._shared.check(operation)
        if self._interrupted:
            raise CommError(f"{operation}: {INTERRUPTED}")
        missing, seconds = self._shared.find_missing(self.rank, peer), seconds_until(deadline, self.timeout)
        raise CommTimeout(f"{operation}: no message from rank {missing} within {seconds:g} s")


def alone() -> ThreadCommunicator:
    """The only rank of a world of one."""
    return ThreadCommunicator(_World(1), 0)


def run_threads(
    world: int, fn: Callable[[Communicator], T], timeout: float = TIMEOUTS.threads, *, in_turns: bool = False
) -> list[T]:
    """Call fn(comm) on `world` ranks, each a thread of this process.

    Args:
        world: How many ranks.
        fn: What each rank does, with its communicator.
        timeout: Seconds that an operation between ranks may take.
        in_turns: Let one rank run at a time, until it waits: faster for hundreds of ranks.

    Returns:
        What fn returned, in rank order.

    Raises:
        Exception: The error of the first rank that raised one. The others end at their next operation.

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
                if shared.turn is None or shared.failed is None:  # no rank begins after a failure
                    results[rank] = fn(ThreadCommunicator(shared, rank, timeout))
        except BaseException as error:  # raised in the caller below, whatever it is
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
    except BaseException as interrupt:  # such as Ctrl-C: end the ranks first
        shared.abort(-1, interrupt)
        deadline = time.monotonic() + TIMEOUTS.close
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
