"""Ranks of an MPI communicator, by mpi4py.

MPI has no timeouts: every operation is non-blocking and tested until it is done or its deadline has passed. MPI
moves data only while it is called, a few kilobytes of a long message at a time, so tests must come thick and fast.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CommError, CommTimeout
from ..metrics.traffic import Operation
from .base import DEFAULT_TIMEOUT, Communicator, listed, seconds_until, trim

_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
"""A sleep of 0 s takes about 100 µs; some systems have nothing else."""
_BURST = 64
"""Tests in a row. Fewer of them between two sleeps starve a long message."""
_AWAKE = 0.01
"""Seconds of waiting before the first sleep."""
_SLEEP_SHARE, _LONGEST_SLEEP = 0.01, 0.001
_LAST_WORDS = 0.5
"""Seconds for mpiexec to pass on what ranks have printed: an abort cuts it off."""

_DATA, _HERE = 0, 1
"""Tags: of messages, and of the word of a rank that it is there."""
_ROLL_CALL = 2.0
"""Seconds for such words."""


def wait_for(done: Callable[[], bool], deadline: float) -> bool:
    """Call done() until it says yes; False if the deadline passes first.

    After each call other ranks on the same core come first. Who has waited for long sleeps after each burst, for a
    small share of the time it has waited.
    """
    start = time.monotonic()
    while not _burst(done):
        now = time.monotonic()
        if now > deadline:
            return False
        if now - start > _AWAKE:
            time.sleep(min(_SLEEP_SHARE * (now - start), _LONGEST_SLEEP))
    return True


def _burst(done: Callable[[], bool]) -> bool:
    for _ in range(_BURST):
        if done():
            return True
        _give_way()
    return False


def _abort_on_uncaught(mpi: Any) -> None:
    """From now on an exception that ends this process ends the job: MPI_Finalize would wait for the others."""
    previous = sys.excepthook
    if getattr(previous, "aborts_mpi", False):
        return

    def hook(kind: Any, error: Any, trace: Any) -> None:
        previous(kind, error, trace)
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        mpi.COMM_WORLD.Abort(1)

    hook.aborts_mpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook


class _Request:
    """A non-blocking MPI operation on a buffer."""

    def __init__(self, comm: MPICommunicator, request: Any, buffer: Tensor, what: str) -> None:
        self.comm, self.request, self.buffer, self.what = comm, request, buffer, what

    def wait(self, deadline: float) -> Tensor:
        self.comm.poll(self.request, deadline, self.what)
        return self.buffer


class _Receive(_Request):
    def __init__(
        self, comm: MPICommunicator, request: Any, buffer: Tensor, peer: int, operation: Operation, what: str
    ) -> None:
        super().__init__(comm, request, buffer, what)
        self.peer, self.operation = peer, operation

    def wait(self, deadline: float) -> Tensor:
        return trim(super().wait(deadline), self.peer, self.operation)


class MPICommunicator(Communicator):
    """A duplicate of an mpi4py communicator (default: COMM_WORLD), so that nobody else's messages mix in.

    After a timeout MPI cannot be finalised in order; then the process aborts the MPI job when it exits, which
    ends all other ranks too. So does an exception that nobody catches.
    """

    def __init__(self, comm: Any = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise CommError("MPI needs mpi4py and an MPI library: pip install 'oktopk[mpi]'") from error
        base = MPI.COMM_WORLD if comm is None else comm
        super().__init__(base.Get_rank(), base.Get_size(), timeout)
        self._mpi = MPI
        self._lost = False
        self._under_way: dict[int, tuple[Any, object]] = {}
        """Requests by id, each with the buffer that MPI may still read or write."""
        request: Any
        self._comm: Any
        self._comm, request = base.Idup()
        self.poll(request, self._deadline(), "setting up: no answer from the other ranks")
        if self.world > 1:
            _abort_on_uncaught(MPI)

    def poll(self, request: Any, deadline: float, what: str) -> None:
        """Wait for a request."""
        if not wait_for(partial(self._call, request.Test, what=what), deadline):
            self._give_up()
            raise CommTimeout(f"{what} within {seconds_until(deadline, self.timeout):g} s")
        self._under_way.pop(id(request), None)

    def _call(self, function: Any, *arguments: Any, what: str, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except self._mpi.Exception as error:
            raise CommError(f"{what}: {error}") from error

    def _give_up(self) -> None:
        """MPI_Finalize would wait for ever: abort at exit instead, and keep all buffers until then."""
        if not self._lost:
            self._lost = True
            atexit.register(self._abort)

    def _abort(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        self._mpi.COMM_WORLD.Abort(1)

    def _keep(self, request: Any, buffer: object) -> Any:
        self._under_way[id(request)] = request, buffer
        return request

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Request:
        what = f"{operation}: no answer from rank {peer}"
        request = self._keep(self._call(self._comm.Isend, message.numpy(), peer, _DATA, what=what), message)
        return _Request(self, request, message, what)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Receive:
        what = f"{operation}: no answer from rank {peer}"
        buffer = torch.empty(capacity, dtype=torch.uint8)
        request = self._keep(self._call(self._comm.Irecv, buffer.numpy(), peer, _DATA, what=what), buffer)
        return _Receive(self, request, buffer, peer, operation, what)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation, deadline = Operation("all_reduce", phase, control), self._deadline()
        what = f"{operation}: no answer from the other ranks"
        # MPI has no half precision; sum in single.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        buffer = wide.cpu().contiguous()
        request = self._call(self._comm.Iallreduce, self._mpi.IN_PLACE, buffer.numpy(), what=what)
        try:
            _Request(self, self._keep(request, buffer), buffer, what).wait(deadline)
        except CommTimeout as error:
            if missing := self._call(self._missing, what=what):
                who, seconds = listed(missing), deadline.seconds
                raise CommTimeout(f"{operation}: no answer from {who} within {seconds:g} s") from error
            raise
        if buffer is not x:
            x.copy_(buffer)

    def _missing(self) -> list[int]:
        """Who does not say that it is there, as all do when their sum has failed."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        word, heard = bytearray(1), {}
        for rank in others:
            room = bytearray(1)
            heard[rank] = self._keep(self._comm.Irecv(room, rank, _HERE), room)
            self._keep(self._comm.Isend(word, rank, _HERE), word)
        wait_for(lambda: all(request.Test() for request in heard.values()), time.monotonic() + _ROLL_CALL)
        return [rank for rank, request in heard.items() if not request.Test()]

    def fail(self, error: BaseException) -> None:
        """End the job with this process: the others cannot be told."""
        self._give_up()

    def close(self) -> None:
        if not self._lost:
            self._comm.Free()
