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
        self, work: Any, peer: int, operation: Operation, finish: Callable[[], Tensor], timeout: float
    ) -> None:
        self.work, self.peer, self.operation = work, peer, operation
        self.finish, self.timeout = finish, timeout

    def wait(self, deadline: float) -> Tensor:
        try:
            self.work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise _explain(error, self.operation, f"rank {self.peer}", deadline, self.timeout) from error
        return self.finish()


def _explain(error: Exception, operation: Operation, who: str, deadline: float, timeout: float) -> CommError:
    if time.monotonic() >= deadline - 0.002:
        return CommTimeout(f"{operation}: no answer from {who} within {timeout:g} s")
    return CommError(f"{operation}: the connection to {who} failed: {error}")


class GroupCommunicator(Communicator):
    """A process group. Use a group of its own if another thread communicates too.

    Messages are in host memory and travel by gloo, which lets a receive be larger than the message. A group
    without gloo (nccl alone) gets a companion group for them, made by all its ranks together; its own backend
    does the dense sums.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        companion: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise CommError("torch.distributed is not initialised: call init_process_group first")
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self._own: Any = dist.group.WORLD if group is None else group
        self._messages: Any = self._own
        if "cpu:gloo" not in dist.get_backend_config(group) if companion is None else companion:
            ranks = dist.get_process_group_ranks(self._own)
            limit = timedelta(seconds=timeout)
            self._messages = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=True)

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> _Work:
        try:
            work = dist.isend(message, group=self._messages, group_dst=peer)
        except (RuntimeError, ValueError) as error:
            raise CommError(f"{operation}: cannot send to rank {peer}: {error}") from error
        return _Work(work, peer, operation, lambda: message, self.timeout)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> _Work:
        buffer = torch.empty(capacity, dtype=torch.uint8)
        try:
            work = dist.irecv(buffer, group=self._messages, group_src=peer)
        except (RuntimeError, ValueError) as error:
            raise CommError(f"{operation}: cannot receive from rank {peer}: {error}") from error
        return _Work(work, peer, operation, lambda: trim(buffer, peer, operation), self.timeout)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        operation = Operation("all_reduce", phase, control)
        deadline = self._deadline()
        summed = x.contiguous()
        # The options bound gloo's own thread too; without them it waits on, and the process cannot end.
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self.timeout)
        group = self._messages if x.is_cpu else self._own
        try:
            group.allreduce([summed], options).wait(options.timeout)
        except RuntimeError as error:
            raise _explain(error, operation, "the other ranks", deadline, self.timeout) from error
        if summed is not x:
            x.copy_(summed)
