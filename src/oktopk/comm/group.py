"""Ranks of a torch.distributed process group (gloo, nccl)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommError, CommTimeout
from .base import DEFAULT_TIMEOUT, Communicator, Operation, trim


class _Work:
    """One or two torch Works with their buffers kept alive, and errors that say who and where."""

    def __init__(
        self,
        works: Sequence[Any],
        peer: int,
        operation: Operation,
        finish: Callable[[], Tensor],
        timeout: float,
    ) -> None:
        self.works, self.peer, self.operation = works, peer, operation
        self.finish, self.timeout = finish, timeout

    def wait(self, deadline: float) -> Tensor:
        try:
            for work in self.works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
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
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._exact = backend != "gloo" if exact_receives is None else exact_receives
        self.announcement_bytes = 8 if self._exact else 0
        self.ahead: list[deque[_SizedReceive]] = [deque() for _ in range(self.world)]

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Work:
        parts = [message.to(self.device)]
        if self._exact:
            parts.insert(0, torch.tensor([message.numel()], device=self.device))
        try:
            works = [dist.isend(part, group=self.group, group_dst=peer) for part in parts]
        except RuntimeError as error:
            raise CommError(f"{operation}: cannot send to rank {peer}: {error}") from error
        return _Work(works, peer, operation, lambda: parts[-1], self.timeout)

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
        return _Work([work], peer, operation, finish, self.timeout)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        deadline = self._deadline()
        on_device = x.to(self.device).contiguous()
        try:
            # The options bound gloo's own thread too; without them it waits on, and the process cannot end.
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=self.timeout)
            assert self.group is not None  # only for ranks outside of the group
            self.group.allreduce([on_device], options).wait(options.timeout)
        except RuntimeError as error:
            raise _explain(error, operation, "the other ranks", deadline, self.timeout) from error
        if on_device is not x:
            x.copy_(on_device)


class _SizedReceive:
    """A receive for backends that want to know the exact size: first the length, then the message.

    Both are posted when somebody waits, after those of the receives that came before from the same peer.
    """

    def __init__(self, comm: GroupCommunicator, capacity: int, peer: int, operation: Operation) -> None:
        self.comm, self.capacity, self.peer, self.operation = comm, capacity, peer, operation
        self.message: Tensor | None = None
        comm.ahead[peer].append(self)

    def wait(self, deadline: float) -> Tensor:
        queue = self.comm.ahead[self.peer]
        while self.message is None:
            queue.popleft().fetch(deadline)
        return self.message

    def fetch(self, deadline: float) -> None:
        length = torch.zeros(1, dtype=torch.int64, device=self.comm.device)
        size = int(self._receive(length, deadline))
        if not 0 <= size <= self.capacity:
            raise CommError(f"{self.operation}: rank {self.peer} announces {size} of {self.capacity} bytes")
        buffer = torch.empty(size, dtype=torch.uint8, device=self.comm.device)
        self.message = trim(self._receive(buffer, deadline).cpu(), self.peer, self.operation)

    def _receive(self, buffer: Tensor, deadline: float) -> Tensor:
        return self.comm.receive(buffer, self.peer, self.operation, lambda: buffer).wait(deadline)
