"""Ranks of an MPI communicator, by mpi4py.

MPI has no timeouts: every operation is non-blocking and polled until it is done or its deadline has passed.
"""

from __future__ import annotations

import atexit
import time
from typing import Any

import torch
from torch import Tensor

from ..errors import CommError, CommTimeout
from .base import DEFAULT_TIMEOUT, Communicator, Operation, trim

_SPINS = 50
_LONGEST_SLEEP = 0.001


class _Request:
    """A non-blocking MPI operation; the buffer lives as long as the request may write to it."""

    def __init__(self, comm: MPICommunicator, request: Any, buffer: Tensor, who: str, operation: Operation):
        self.comm, self.request, self.buffer, self.who, self.operation = comm, request, buffer, who, operation

    def wait(self, deadline: float) -> Tensor:
        self.comm.poll(self.request, deadline, self.buffer, f"{self.operation}: no answer from {self.who}")
        return self.buffer


class _Receive(_Request):
    def __init__(self, comm: MPICommunicator, request: Any, buffer: Tensor, peer: int, operation: Operation):
        super().__init__(comm, request, buffer, f"rank {peer}", operation)
        self.peer = peer

    def wait(self, deadline: float) -> Tensor:
        return trim(super().wait(deadline), self.peer, self.operation)


class MPICommunicator(Communicator):
    """A duplicate of an mpi4py communicator (default: COMM_WORLD), so that nobody else's messages mix in.

    After a timeout MPI cannot be finalised in order; then the process aborts the MPI job when it exits, which
    ends all other ranks too.
    """

    def __init__(self, comm: Any = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise CommError("MPI needs mpi4py and an MPI library: pip install 'oktopk[mpi]'") from error
        base = MPI.COMM_WORLD if comm is None else comm
        super().__init__(base.Get_rank(), base.Get_size(), timeout)
        self._mpi = MPI
        self._lost: list[tuple[Any, Tensor]] = []
        request: Any
        self._comm: Any
        self._comm, request = base.Idup()
        self.poll(request, self._deadline(), torch.empty(0), "setting up: no answer from the other ranks")

    def poll(self, request: Any, deadline: float, buffer: Tensor, what: str) -> None:
        """Test until done. Spin a little first; then sleep, because ranks may share cores."""
        spins, pause = 0, 0.00002
        while not self._test(request, what):
            spins += 1
            if spins < _SPINS:
                time.sleep(0)
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP)
            if time.monotonic() > deadline:
                self._give_up(request, buffer)
                raise CommTimeout(f"{what} within {self.timeout:g} s")

    def _test(self, request: Any, what: str) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            raise CommError(f"{what}: {error}") from error

    def _give_up(self, request: Any, buffer: Tensor) -> None:
        if not self._lost:
            atexit.register(self._mpi.COMM_WORLD.Abort, 1)
        self._lost.append((request, buffer))  # MPI may still write to it

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Request:
        request = self._comm.Isend(message.numpy(), dest=peer)
        return _Request(self, request, message, f"rank {peer}", operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Receive:
        buffer = torch.empty(capacity, dtype=torch.uint8)
        return _Receive(self, self._comm.Irecv(buffer.numpy(), source=peer), buffer, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        # MPI has no half precision; sum in single.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        buffer = wide.cpu().contiguous()
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, buffer.numpy())
        _Request(self, request, buffer, "the other ranks", operation).wait(self._deadline())
        if buffer is not x:
            x.copy_(buffer)

    def close(self) -> None:
        if not self._lost:
            self._comm.Free()
