"""Ranks of a torch.distributed process group (gloo, nccl)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommError, CommTimeout
from .base import DEFAULT_TIMEOUT, Communicator, Operation, trim


class _Work:
    """A torch Work with its buffer kept alive, and errors that say who and where."""

    def __init__(
        self,
        work: Any,
        peer: int,
        operation: Operation,
        finish: Callable[[], Tensor],
        timeout: float,
    ) -> None:
        self.work, self.peer, self.operation, self.finish, self.timeout = (
            work,
            peer,
            operation,
            finish,
            timeout,
        )

    def wait(self, deadline: float) -> Tensor:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self.work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise _explain(error, self.operation, f"rank {self.peer}", deadline, self.timeout) from error
        return self.finish()


def _explain(error: Exception, operation: Operation, who: str, deadline: float, timeout: float) -> CommError:
    if time.monotonic() >= deadline - 0.002:
        return CommTimeout(f"{operation}: no answer from {who} within {timeout:g} s")
    return CommError(f"{operation}: the connection to {who} failed: {error}")


class GroupCommunicator(Communicator):
    """A process group. Use a group of its own if another thread communicates too.

    Gloo lets a receive be larger than the message. Backends that do not (nccl) get the length in a message of
    its own first.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        exact_receives: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise CommError("torch.distributed is not initialised: call init_process_group first")
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self.group = group if group is not None else dist.group.WORLD
        backend = dist.get_backend(group)
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._exact = backend != "gloo" if exact_receives is None else exact_receives
        self.announcement_bytes = 8 if self._exact else 0

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Work:
        outgoing = message.to(self._device)
        kept = [outgoing]
        try:
            if self._exact:
                kept.append(torch.tensor([message.numel()], device=self._device))
                dist.isend(kept[1], group=self.group, group_dst=peer)
            work = dist.isend(outgoing, group=self.group, group_dst=peer)
        except RuntimeError as error:
            raise CommError(f"{operation}: cannot send to rank {peer}: {error}") from error
        return _Work(work, peer, operation, lambda: kept[0], self.timeout)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Work | _SizedReceive:
        if self._exact:
            return _SizedReceive(self, capacity, peer, operation)
        buffer = torch.empty(capacity, dtype=torch.uint8)
        return self.receive(buffer, peer, operation, lambda: trim(buffer, peer, operation))

    def receive(self, buffer: Tensor, peer: int, operation: Operation, finish: Callable[[], Tensor]) -> _Work:
        try:
            work = dist.irecv(buffer, group=self.group, group_src=peer)
        except RuntimeError as error:
            raise CommError(f"{operation}: cannot receive from rank {peer}: {error}") from error
        return _Work(work, peer, operation, finish, self.timeout)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        deadline = self._deadline()
        on_device = x.to(self._device)
        try:
            work = dist.all_reduce(on_device, group=self.group, async_op=True)
            assert work is not None  # async_op=True always gives one
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise _explain(error, operation, "the other ranks", deadline, self.timeout) from error
        if on_device is not x:
            x.copy_(on_device)


class _SizedReceive:
    """A receive for backends that want to know the exact size: first the length, then the message."""

    def __init__(self, comm: GroupCommunicator, capacity: int, peer: int, operation: Operation) -> None:
        self.comm, self.capacity, self.peer, self.operation = comm, capacity, peer, operation
        self.length = torch.zeros(1, dtype=torch.int64, device=comm._device)
        self.work = comm.receive(self.length, peer, operation, lambda: self.length)

    def wait(self, deadline: float) -> Tensor:
        length = int(self.work.wait(deadline))
        if not 0 <= length <= self.capacity:
            raise CommError(f"{self.operation}: rank {self.peer} announces {length} of {self.capacity} bytes")
        buffer = torch.empty(length, dtype=torch.uint8, device=self.comm._device)
        self.comm.receive(buffer, self.peer, self.operation, lambda: buffer).wait(deadline)
        return trim(buffer.cpu(), self.peer, self.operation)
