"""Ranks of an MPI communicator, by mpi4py.

MPI has no timeouts: every operation is non-blocking and tested until it is done or its deadline has passed. MPI
moves data only while it is called, a few kilobytes of a long message at a time, so tests must follow closely.
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
from ..utils.extras import install_command
from ..utils.timeouts import TIMEOUTS, seconds_until
from .base import Communicator
from .messages import trim
from .transport import format_ranks

_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))
"""A sleep of 0 s takes about 100 µs; some systems have no other way."""
_BURST = 64
"""Tests in a row. Fewer of them between two sleeps starve a long message."""
_AWAKE = 0.01
"""Seconds of waiting before the first sleep."""
_SLEEP_SHARE, _LONGEST_SLEEP = 0.01, 0.001

_DATA, _ALIVE = 0, 1
"""Tags: of messages, and of notes that a rank is alive."""


def wait_for(done: Callable[[], bool], deadline: float) -> bool:
    """Call done() until it returns True; False if the deadline passes first.

    After each call other ranks on the same core run first. After a long wait there is a sleep between bursts, for
    a small share of the time that was waited.
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
        _yield_core()
    return False


def _abort(mpi: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(TIMEOUTS.last_output)  # an abort cuts off what mpiexec has not passed on
    mpi.COMM_WORLD.Abort(1)


def _abort_on_uncaught(mpi: Any) -> None:
    """From now on an uncaught exception aborts the job: MPI_Finalize would wait for the other ranks."""
    previous = sys.excepthook
    if getattr(previous, "aborts_mpi", False):
        return

    def hook(kind: Any, error: Any, trace: Any) -> None:
        previous(kind, error, trace)
        _abort(mpi)

    hook.aborts_mpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook


class _Request:
    """A non-blocking MPI operation, and what it results in."""

    def __init__(self, comm: MPICommunicator, request: Any, what: str, result: Callable[[], Tensor]) -> None:
        self.comm, self.request, self.what, self.result = comm, request, what, result

    def wait(self, deadline: float) -> Tensor:
        self.comm.poll(self.request, deadline, self.what)
        return self.result()


class MPICommunicator(Communicator):
    """The ranks of an MPI job.

    It uses a duplicate of the mpi4py communicator, so that its messages do not mix with others. After a timeout
    MPI cannot be finalised; then the process aborts the MPI job when it exits, which ends all other ranks too. So
    does an uncaught exception.

    Args:
        comm: An mpi4py communicator; by default COMM_WORLD.
        timeout: Seconds that an operation may take.

    Raises:
        CommError: mpi4py is not installed, or the ranks could not connect.

    Example, in every process of `mpiexec -n 2`::

        comm = oktopk.MPICommunicator(timeout=60)
        x = torch.ones(3)
        comm.all_reduce_(x, "example")  # tensor([2., 2., 2.])
        comm.close()
    """

    def __init__(self, comm: Any = None, timeout: float = TIMEOUTS.operation) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise CommError(f"MPI needs mpi4py and an MPI library: {install_command('mpi')}") from error
        base = MPI.COMM_WORLD if comm is None else comm
        super().__init__(base.Get_rank(), base.Get_size(), timeout)
        self._mpi = MPI
        self._aborting = False
        self._pending: dict[int, tuple[Any, object]] = {}
        """Requests by id, each with the buffer that MPI may still read or write."""
        request: Any
        self._comm: Any
        self._comm, request = base.Idup()
        self.poll(request, self._deadline(), "setup: no answer from the other ranks")
        if self.world > 1:
            _abort_on_uncaught(MPI)

    def poll(self, request: Any, deadline: float, what: str) -> None:
        """Wait for a request; `what` begins the error if it times out."""
        if not wait_for(partial(self._call, request.Test, what=what), deadline):
            self._abort_at_exit()
            raise CommTimeout(f"{what} within {seconds_until(deadline, self.timeout):g} s")
        self._pending.pop(id(request), None)

    def _call(self, function: Any, *arguments: Any, what: str, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except self._mpi.Exception as error:
            raise CommError(f"{what}: {error}") from error

    def _abort_at_exit(self) -> None:
        """MPI_Finalize would wait forever: abort at exit instead, and keep all buffers until then."""
        if not self._aborting:
            self._aborting = True
            atexit.register(_abort, self._mpi)

    def _track(self, request: Any, buffer: object) -> Any:
        self._pending[id(request)] = request, buffer
        return request

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Request:
        what = f"{operation}: no answer from rank {peer}"
        request = self._track(self._call(self._comm.Isend, message.numpy(), peer, _DATA, what=what), message)
        return _Request(self, request, what, lambda: message)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Request:
        what = f"{operation}: no answer from rank {peer}"
        buffer = torch.empty(capacity, dtype=torch.uint8)
        request = self._track(self._call(self._comm.Irecv, buffer.numpy(), peer, _DATA, what=what), buffer)
        return _Request(self, request, what, lambda: trim(buffer, peer, operation))

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation, deadline = Operation("all_reduce", phase, control), self._deadline()
        what = f"{operation}: no answer from the other ranks"
        # MPI has no half precision; sum in single.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        buffer = wide.cpu().contiguous()
        request = self._call(self._comm.Iallreduce, self._mpi.IN_PLACE, buffer.numpy(), what=what)
        try:
            self.poll(self._track(request, buffer), deadline, what)
        except CommTimeout as error:
            if missing := self._call(self._find_missing, what=what):
                who, seconds = format_ranks(missing), deadline.seconds
                raise CommTimeout(f"{operation}: no answer from {who} within {seconds:g} s") from error
            raise
        if buffer is not x:
            x.copy_(buffer)

    def _find_missing(self) -> list[int]:
        """The ranks that send no note that they are alive, as all do when their sum has failed."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        note, notes = bytearray(1), {}
        for rank in others:
            buffer = bytearray(1)
            notes[rank] = self._track(self._comm.Irecv(buffer, rank, _ALIVE), buffer)
            self._track(self._comm.Isend(note, rank, _ALIVE), note)
        wait_for(lambda: all(request.Test() for request in notes.values()), time.monotonic() + TIMEOUTS.roll_call)
        return [rank for rank, request in notes.items() if not request.Test()]

    def fail(self, error: BaseException) -> None:
        """Abort the job when this process ends: MPI has no other way to tell the other ranks."""
        self._abort_at_exit()

    def close(self) -> None:
        if not self._aborting:
            self._comm.Free()
