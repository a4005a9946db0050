"""Messages between the ranks of a host, and the transports that hand tensors from one to the other."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import Metered
from ...comm.messages import parse_json, seal, sealed_bytes, unseal
from ...feedback.buckets import Bucket
from ...metrics.traffic import Operation, Traffic

_ROOM = 1 << 20
"""The most bytes of a JSON message."""
MEAN, RESULT = "host mean", "host result"
"""Phases of a step inside a host."""
Entries = tuple[Bucket, Sequence[Tensor]]
"""The result of a bucket: indices and values, or all of it."""


class LocalLinks:
    """Checked messages between two ranks of a host, each with its number in the order between the two."""

    def __init__(self, comm: Metered) -> None:
        self.comm = comm
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(self, payload: Tensor, rank: int, phase: str, *, control: bool = False) -> None:
        operation = Operation("send", phase, control)
        message = seal(payload, self.comm.rank, self._sent[rank], operation)
        self._sent[rank] += 1
        self.comm.send(message, rank, phase, control=control)

    def recv(
        self, capacity: int, rank: int, phase: str, dtype: torch.dtype, *, control: bool = False,
        patience: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Up to `capacity` bytes of a rank; `patience` is in timeouts of the communicator."""
        operation, timeout = Operation("recv", phase, control), patience * self.comm.timeout
        message = self.comm.recv(sealed_bytes(capacity), rank, phase, control=control, timeout=timeout)
        payload = unseal(message, rank, self._received[rank], operation, dtype)
        self._received[rank] += 1
        return payload

    def send_json(self, value: Any, rank: int, phase: str) -> None:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.send(text, rank, phase, control=True)

    def recv_json(self, rank: int, phase: str, patience: float = 1.0) -> Any:
        text = self.recv(_ROOM, rank, phase, torch.uint8, control=True, patience=patience)
        return parse_json(bytes(text.numpy()), rank, phase)


class LocalTransport(ABC):
    """How the ranks of a host hand tensors to each other: sums to the rank before, results to all members."""

    def __init__(self, links: LocalLinks) -> None:
        self.links = links

    def pop_traffic(self) -> dict[Operation, Traffic]:
        """What was moved by other means than messages since the last call."""
        return {}

    @abstractmethod
    def sum_buffer(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Memory where the first rank of the chain puts its part of a sum."""

    @abstractmethod
    def send_sum(self, bucket: Bucket, total: Tensor, rank: int) -> None: ...

    @abstractmethod
    def recv_sum(self, bucket: Bucket, dtype: torch.dtype, rank: int, patience: float) -> Tensor: ...

    @abstractmethod
    def publish(self, outcome: Any, results: Sequence[Entries], ranks: Sequence[int]) -> None:
        """Send members the outcome of a step, as JSON, and the tensors of its results."""

    @abstractmethod
    def receive(self, bucket: Bucket, shapes: Sequence[tuple[int, torch.dtype]], leader: int) -> list[Tensor]:
        """The tensors of a result, by number of entries and type."""


class SubgroupTransport(LocalTransport):
    """Tensors travel in messages between the ranks of the host."""

    def sum_buffer(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        return torch.empty(bucket.size, dtype=dtype)

    def send_sum(self, bucket: Bucket, total: Tensor, rank: int) -> None:
        self.links.send(total, rank, MEAN)

    def recv_sum(self, bucket: Bucket, dtype: torch.dtype, rank: int, patience: float) -> Tensor:
        return self.links.recv(bucket.size * dtype.itemsize, rank, MEAN, dtype, patience=patience)

    def publish(self, outcome: Any, results: Sequence[Entries], ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.links.send_json(outcome, rank, RESULT)
            for _, parts in results:
                for part in parts:
                    self.links.send(part, rank, RESULT)

    def receive(self, bucket: Bucket, shapes: Sequence[tuple[int, torch.dtype]], leader: int) -> list[Tensor]:
        return [self.links.recv(count * dtype.itemsize, leader, RESULT, dtype) for count, dtype in shapes]
