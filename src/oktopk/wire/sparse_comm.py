"""Collectives on sparse vectors: the wire format on top of a communicator, for one step of one bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ..comm import Communicator, Operation
from ..errors import WireError
from ..metrics.stopwatch import Stopwatch
from . import message as wire
from .message import Tag, ValueCode
from .sparse_vector import SparseVector

Region = tuple[int, int]


class Phase(IntEnum):
    """The part of an algorithm a message belongs to."""

    SPLIT = 0
    BALANCE = 1
    GATHER = 2
    TREE = 3
    BROADCAST = 4


_OPERATIONS = {
    Phase.SPLIT: Operation("all_to_all", "split"),
    Phase.BALANCE: Operation("all_to_all", "balance"),
    Phase.GATHER: Operation("all_gather", "gather"),
    Phase.TREE: Operation("recv", "tree"),
    Phase.BROADCAST: Operation("broadcast", "broadcast"),
}
"""How the transport calls the phase in its own errors."""


class SparseCommunicator:
    """What one rank says to the others about one bucket in one step.

    Every message carries `nonfinite`: whether its sender has met, itself or in what it received, a number that
    is not finite. Once a round has passed through all ranks, all of them know, and skip the step together.
    """

    def __init__(
        self,
        comm: Communicator,
        size: int,
        *,
        step: int = 0,
        bucket: int = 0,
        values: ValueCode = ValueCode.FP32,
        raw_indices: bool = False,
        device: torch.device | None = None,
        stopwatch: Stopwatch | None = None,
        blocked_before: float = 0.0,
    ) -> None:
        self.transport, self.size, self.step, self.bucket, self.values = comm, size, step, bucket, values
        self.raw_indices = raw_indices
        self.device = None if device is None or device.type == "cpu" else device
        self.nonfinite = False
        self.stopwatch = stopwatch or Stopwatch()
        self._blocked_before = blocked_before
        self.blocked_sent = 0.0
        """How long this rank has been blocked by others, as it last told them: in this reduction so far or, in
        the first messages, in the one before."""
        self.blocked_received: dict[int, float] = {}
        """The same of the other ranks."""

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world(self) -> int:
        return self.transport.world

    def check_finite(self, finite: bool) -> None:
        """Remember, and tell everybody from now on, if something was not finite."""
        self.nonfinite = self.nonfinite or not finite

    def exchange(
        self, parts: Sequence[SparseVector], edges: Sequence[int], limit: int
    ) -> tuple[list[SparseVector], Iterator[SparseVector]]:
        """Send parts[j], at most `limit` entries in [edges[j], edges[j+1]), to rank j.

        Returns the parts as their receivers see them, the own one untouched, and what arrives here, in the
        order r-1, r-2, …
        """
        regions = list(itertools.pairwise(edges))
        sent = list(parts)
        messages: list[Tensor | None] = [None] * self.world
        for peer in self._others():
            messages[peer], sent[peer] = self._encode(parts[peer], Phase.SPLIT, regions[peer])
        capacity = wire.capacity(limit, max(stop - start for start, stop in regions), self.values)
        incoming = self.transport.exchange(messages, capacity, "split")
        return sent, (self._decode(m, Phase.SPLIT, peer, regions[self.rank]) for peer, m in incoming)

    def rearrange(
        self, parts: Sequence[SparseVector], sources: Sequence[bool], limit: int
    ) -> tuple[list[SparseVector], dict[int, SparseVector]]:
        """Send parts[j] to rank j unless it is empty; `sources` says which ranks send something here.

        Returns the parts as their receivers see them, the own one untouched, and what arrived, by source.
        """
        sent = list(parts)
        messages: list[Tensor | None] = [None] * self.world
        for peer in self._others():
            if len(parts[peer]):
                messages[peer], sent[peer] = self._encode(parts[peer], Phase.BALANCE, self._whole)
        capacity = wire.capacity(limit, self.size, self.values)
        incoming = self.transport.exchange(messages, capacity, "balance", sources=sources)
        return sent, {peer: self._decode(m, Phase.BALANCE, peer, self._whole) for peer, m in incoming}

    def all_gather(
        self, part: SparseVector, capacity: int, edges: Sequence[int] | None = None
    ) -> list[SparseVector]:
        """Everybody's part as every receiver sees it, the own one included, in rank order.

        With `edges` given, rank j's part lies in [edges[j], edges[j+1]), which codes shorter.
        """
        if self.world == 1:
            return [part]
        regions = [self._whole] * self.world
        if edges is not None:
            regions = list(itertools.pairwise(edges))
        message, own = self._encode(part, Phase.GATHER, regions[self.rank])
        gathered = self.transport.all_gather(message, capacity, "gather")
        parts = {peer: self._decode(gathered[peer], Phase.GATHER, peer, regions[peer]) for peer in self._others()}
        return [parts.get(peer, own) for peer in range(self.world)]

    def send(self, part: SparseVector, peer: int) -> SparseVector:
        """Send to one peer; returns the part as it will be seen there."""
        message, seen = self._encode(part, Phase.TREE, self._whole)
        self.transport.send(message, peer, "tree")
        return seen

    def recv(self, peer: int, limit: int) -> SparseVector:
        message = self.transport.recv(wire.capacity(limit, self.size, self.values), peer, "tree")
        return self._decode(message, Phase.TREE, peer, self._whole)

    def broadcast(self, part: SparseVector | None, limit: int) -> SparseVector:
        """Rank 0's part on every rank, rank 0 included, as receivers see it."""
        if part is not None and self.world == 1:
            return part
        message = None if part is None else self._encode(part, Phase.BROADCAST, self._whole)[0]
        message = self.transport.broadcast(message, wire.capacity(limit, self.size, self.values), "broadcast")
        return self._decode(message, Phase.BROADCAST, 0, self._whole)

    @property
    def _whole(self) -> Region:
        return 0, self.size

    def _others(self) -> Iterator[int]:
        return (peer for peer in range(self.world) if peer != self.rank)

    def _tag(self, phase: Phase, sender: int, region: Region) -> Tag:
        start, stop = region
        who = self.transport.known_as(sender)
        return Tag(self.step, self.bucket, int(phase), who, self.size, start, stop - start)

    def _encode(self, part: SparseVector, phase: Phase, region: Region) -> tuple[Tensor, SparseVector]:
        tag = self._tag(phase, self.rank, region)
        self.blocked_sent = self.stopwatch.seconds("exchange") or self._blocked_before
        with self.stopwatch.stage("encode"):
            message, decoded = wire.encode(
                part, tag, self.values, self.nonfinite, self.raw_indices, self.blocked_sent
            )
        return message, part.with_values(decoded)

    def _decode(self, message: Tensor, phase: Phase, peer: int, region: Region) -> SparseVector:
        with self.stopwatch.stage("decode"):
            try:
                decoded = wire.decode(message, self._tag(phase, peer, region), self.device)
            except WireError as error:
                raise WireError(f"{_OPERATIONS[phase]}: {error}") from error
        self.blocked_received[peer] = decoded.blocked
        self.check_finite(not decoded.nonfinite)
        return decoded.vector
