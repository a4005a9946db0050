"""Ranks of one host act as one: they average in memory that they share, and the first of them speaks for all.

    host 0    rank 2 ──► rank 1 ──► rank 0     the leader: it has the residual
                                      ▲
                                      │        sparse or dense, between leaders only
                                      ▼
    host 1    rank 5 ──► rank 4 ──► rank 3

A bucket passes along the host: the last rank writes its gradient, the others add theirs. When the step is settled,
the leader leaves the results in memory for the members, its other ranks. Messages only say whose turn it is.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import Metered, Subset
from ..comm.control import seal, sealed_bytes, unseal
from ..feedback.buckets import Bucket
from ..metrics.traffic import Operation, Traffic
from .memory import created, opened

_ROOM = 1 << 20
"""Bytes of a word to another rank of the host, at most."""
_ALL = -1
"""As the number of entries in a result: it is dense."""
_BETWEEN, _RESULT = 0.25, 0.5
"""How much more patient, in timeouts, leaders are with each other than with their members, and members with their
leader. Who waits for somebody that waits must not be the first to give up: it would name the wrong rank."""


@dataclass(frozen=True)
class _Segment:
    """Memory for one bucket that the ranks of a host share."""

    mean: Tensor
    """Where gradients add up."""
    result: Tensor
    """Bytes. Apart from the mean: a rank may hand in its next gradient while another one reads this."""


class Host:
    """The ranks of a host, as one of them sees it."""

    def __init__(self, comm: Metered, ranks: int) -> None:
        if comm.world % ranks:
            raise ValueError(f"ranks_per_host is {ranks}, but {comm.world} ranks are not a multiple of that")
        self.comm, self.ranks = comm, ranks
        self.leader = comm.rank - comm.rank % ranks
        self.last = self.leader + ranks - 1
        self._segments: dict[Bucket, _Segment] = {}
        self._said: Counter[int] = Counter()
        """How many words each rank of the host was told; `_heard`, how many it has said."""
        self._heard: Counter[int] = Counter()
        self._busy = 0.0
        self._memory: dict[Operation, Traffic] = {}

    @property
    def leads(self) -> bool:
        return self.comm.rank == self.leader

    def __str__(self) -> str:
        return f"ranks {self.leader} to {self.last}"

    def between(self) -> Metered:
        """The leaders of all hosts among themselves; a member has nobody to talk to there."""
        ranks = range(0, self.comm.world, self.ranks) if self.leads else [self.comm.rank]
        return Metered(Subset(self.comm.inner, ranks, self._patience(_BETWEEN)))

    def average(self, bucket: Bucket, grad: Tensor) -> None:
        """On the leader `grad` becomes the mean over the host, on members zero."""
        with self._at_work():
            self._average(bucket, grad)

    def _average(self, bucket: Bucket, grad: Tensor) -> None:
        mean, share, rank = self._segment(bucket, grad).mean, 1.0 / self.ranks, self.comm.rank
        own = grad.to(mean.device, mean.dtype)
        if rank == self.last:
            torch.mul(own, share, out=mean)
        else:
            self._hear_from(rank + 1, "host mean", _BETWEEN * (self.last - 1 - rank) / self.ranks)
            if not self.leads:
                mean.add_(own, alpha=share)
        if not self.leads:
            self._wrote(mean.nbytes, "host mean")
            self._say("added", rank - 1, "host mean")
            grad.zero_()
        elif own is grad:
            torch.add(mean, grad, alpha=share, out=grad)
        else:
            grad.copy_(mean.add_(own, alpha=share))

    # The end of a step.

    def leave(self, bucket: Bucket, grad: Tensor, places: Sequence[Tensor] | None) -> int:
        """As the leader: a result for the members, its entries at these places or all. Returns their number."""
        with self._at_work():
            room = self._segments[bucket].result
            count = _ALL if places is None else sum(part.numel() for part in places)
            size = (8 + grad.itemsize) * count
            if places is None or size > room.numel():
                count, size = _ALL, grad.nbytes
                room[:size].view(grad.dtype).copy_(grad)
            else:
                indices, values = _entries(room, count, grad.dtype)
                torch.cat([part.to(room.device, torch.int64) for part in places], out=indices)
                values.copy_(grad[indices.to(grad.device)])
            self._wrote(size, "host result")
            return count

    def take(self, bucket: Bucket, grad: Tensor, count: int) -> None:
        """A member takes a result that has so many entries; `grad` is zero where it has none."""
        with self._at_work():
            room = self._segments[bucket].result
            if count == _ALL:
                grad.copy_(room[: grad.nbytes].view(grad.dtype))
            else:
                indices, values = _entries(room, count, grad.dtype)
                grad.index_copy_(0, indices.to(grad.device), values.to(grad.device))

    def tell(self, word: Any) -> None:
        """The leader tells all members how the step has ended."""
        with self._at_work():
            for rank in range(self.leader + 1, self.last + 1):
                self._say(word, rank, "host result")

    def hear(self) -> Any:
        """What the leader tells."""
        with self._at_work():
            return self._hear_from(self.leader, "host result", _RESULT)

    # What it costs.

    def spent(self) -> tuple[float, dict[Operation, Traffic], dict[Operation, Traffic]]:
        """Since the last call: seconds, what this rank has written to shared memory, and its words to others."""
        spent = self._busy, self._memory, self.comm.take()
        self._busy, self._memory = 0.0, {}
        return spent

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._busy += time.perf_counter() - start

    def _wrote(self, size: int, phase: str) -> None:
        operation = Operation("shared_memory", phase)
        self._memory[operation] = self._memory.get(operation, Traffic()) + Traffic(sent_bytes=size)

    # Memory that is shared.

    def _segment(self, bucket: Bucket, grad: Tensor) -> _Segment:
        """All ranks of the host come here for the first time in the same step."""
        if bucket not in self._segments:
            moved = set(bucket.names)
            self._segments = {
                old: segment for old, segment in self._segments.items() if moved.isdisjoint(old.names)
            }
            dtype = torch.promote_types(grad.dtype, torch.float32)
            half = -(-bucket.size * dtype.itemsize // 8) * 8
            whole = self._shared(2 * half)
            mean = whole[: bucket.size * dtype.itemsize].view(dtype)
            self._segments[bucket] = _Segment(mean, whole[half:])
        return self._segments[bucket]

    def _shared(self, size: int) -> Tensor:
        """That many bytes, which the leader creates and the members open."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if not self.leads:
            path = self._hear_from(self.leader, "host memory")
            problem = f"rank {self.comm.rank} and rank {self.leader} have no memory in common"
            shared = opened(path, size, f"{Operation('recv', 'host memory', control=True)}: {problem}")
            self._say("opened", self.leader, "host memory")
            return shared
        with created(size) as (path, shared):
            for rank in range(self.leader + 1, self.last + 1):
                self._say(path, rank, "host memory")
                self._hear_from(rank, "host memory")
        return shared

    # Words between two ranks of the host.

    def _patience(self, more: float) -> float:
        return (1 + more) * self.comm.timeout

    def _say(self, word: Any, rank: int, phase: str) -> None:
        text = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8)
        operation = Operation("send", phase, control=True)
        message = seal(text, self.comm.rank, self._said[rank], operation)
        self._said[rank] += 1
        self.comm.send(message, rank, phase, control=True)

    def _hear_from(self, rank: int, phase: str, more: float = 0.0) -> Any:
        timeout, operation = self._patience(more), Operation("recv", phase, control=True)
        message = self.comm.recv(sealed_bytes(_ROOM), rank, phase, control=True, timeout=timeout)
        text = unseal(message, rank, self._heard[rank], operation, torch.uint8)
        self._heard[rank] += 1
        return json.loads(bytes(text.numpy()))


def _entries(room: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Places for so many indices and values."""
    start, stop = 8 * count, (8 + dtype.itemsize) * count
    return room[:start].view(torch.int64), room[start:stop].view(dtype)
