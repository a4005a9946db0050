"""Collectives on tensors of fixed size: over the messages of any communicator, or on the device by torch.

OverMessages    host memory, sealed messages with checksums and deadlines, metered
OverGroup       one call of the process group's backend each; nccl then neither copies nor waits
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ..errors import WireError
from ..metrics.traffic import Operation
from .messages import seal, sealed_bytes, unseal

if TYPE_CHECKING:
    from .base import Communicator


class FixedCollectives(Protocol):
    """What a step in static shapes needs. Every result lies where its input does."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...

    def all_to_all(self, rows: Tensor, phase: str) -> Tensor:
        """Row j, uint8 [P, bytes], goes to rank j; row j of the result came from rank j."""

    def all_gather(self, row: Tensor, phase: str, control: bool = False) -> Tensor:
        """The rows of all ranks, in rank order: [bytes] becomes [P, bytes]."""

    def all_reduce_(self, counts: Tensor, phase: str) -> None:
        """Add up integers in place: control traffic."""


class OverMessages:
    """By the messages of a communicator. Tensors of a device go through host memory."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.world = comm.rank, comm.world

    def all_to_all(self, rows: Tensor, phase: str) -> Tensor:
        if self.world == 1:
            return rows
        comm, operation, number = self._comm, Operation("all_to_all", phase), next(self._comm.numbers)
        here = rows.cpu()
        mine = comm.global_rank(self.rank)
        messages = [None if peer == self.rank else seal(here[peer], mine, number, operation) for peer in self._all]
        arrived = {self.rank: here[self.rank]}
        for peer, message in comm.exchange(messages, sealed_bytes(here.shape[1]), phase):
            arrived[peer] = self._open(message, peer, number, operation, here.shape[1])
        return torch.stack([arrived[peer] for peer in self._all]).to(rows.device)

    def all_gather(self, row: Tensor, phase: str, control: bool = False) -> Tensor:
        if self.world == 1:
            return row[None]
        comm, operation, number = self._comm, Operation("all_gather", phase, control), next(self._comm.numbers)
        here = row.cpu()
        message = seal(here, comm.global_rank(self.rank), number, operation)
        gathered = comm.all_gather(message, sealed_bytes(here.numel()), phase, control=control)
        parts = [
            here if peer == self.rank else self._open(sealed, peer, number, operation, here.numel())
            for peer, sealed in enumerate(gathered)
        ]
        return torch.stack(parts).to(row.device)

    def all_reduce_(self, counts: Tensor, phase: str) -> None:
        if self.world > 1:
            here = counts.cpu()
            self._comm.all_reduce_(here, phase, control=True)
            if here is not counts:
                counts.copy_(here)

    @property
    def _all(self) -> range:
        return range(self.world)

    def _open(self, message: Tensor, peer: int, number: int, operation: Operation, size: int) -> Tensor:
        who = self._comm.global_rank(peer)
        content = unseal(message, who, number, operation, torch.uint8)
        if content.numel() != size:
            raise WireError(f"{operation}: {content.numel()} bytes from rank {who}, expected {size}")
        return content


class OverGroup:
    """By the collectives of a process group's backend, on its own device.

    Waiting for one of nccl makes the stream wait, not the host.

    Args:
        group: The process group.
        explain: Makes a block in which errors are explained; by default they are raised as they come.
    """

    def __init__(
        self, group: Any, explain: Callable[[Operation], AbstractContextManager[None]] | None = None
    ) -> None:
        self._group, self._explain = group, explain or (lambda operation: nullcontext())
        self.rank, self.world = int(group.rank()), int(group.size())

    def all_to_all(self, rows: Tensor, phase: str) -> Tensor:
        arrived = torch.empty_like(rows)
        with self._explain(Operation("all_to_all", phase)):
            self._group.alltoall_base(arrived, rows.contiguous(), [], [], dist.AllToAllOptions()).wait()
        return arrived

    def all_gather(self, row: Tensor, phase: str, control: bool = False) -> Tensor:
        gathered = row.new_empty(self.world * row.numel())
        with self._explain(Operation("all_gather", phase, control)):
            self._group._allgather_base(gathered, row.contiguous(), AllgatherOptions()).wait()
        return gathered.view(self.world, -1)

    def all_reduce_(self, counts: Tensor, phase: str) -> None:
        with self._explain(Operation("all_reduce", phase, control=True)):
            self._group.allreduce([counts], dist.AllreduceOptions()).wait()
