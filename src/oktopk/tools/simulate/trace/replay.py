"""How long a recorded step takes on a network: a discrete-event replay of what each rank did.

Every rank has a clock, and a link with two directions. A rank goes through its events until it has to wait for a
message. Messages reach the links of their receivers in the order of time, and take their turn there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..network import Network, SimulationError
from .format import CONTROL, DECODE, ENCODE, FLUSH, RECEIVE, RING, WORK, Trace
from .sizes import Scale


@dataclass(frozen=True)
class Prices:
    """γ: what work costs one rank, in seconds."""

    before: float = 0.0
    """Ahead of the first message: absorbing the gradient and selecting."""
    after: float = 0.0
    """After the last message: the residual and the result."""
    encode_part: float = 0.0
    encode_entry: float = 0.0
    decode_part: float = 0.0
    decode_entry: float = 0.0
    scatter_entry: float = 0.0
    """Adding an entry of a sparse vector to a dense one."""
    add_entry: float = 0.0
    """Adding up dense vectors, in the library's allreduce."""

    def work(self, kind: int, parts: int, entries: float) -> float:
        """Of one recorded event."""
        if kind == ENCODE:
            return parts * self.encode_part + entries * self.encode_entry
        if kind == DECODE:
            return parts * self.decode_part + entries * self.decode_entry
        return entries * self.scatter_entry


@dataclass(frozen=True)
class Replayed:
    """A step. What was sent and what was worked is the mean over ranks."""

    seconds: float
    """Until the last rank is done; all start together."""
    work_seconds: float
    sent_bytes: float
    control_bytes: float
    words: float
    """Of four bytes if an index were one word, without control."""
    messages: float


class _Rank:
    """Where a rank is, and when its link is free again."""

    def __init__(self, trace: Trace, start: float) -> None:
        self.events = trace.events()
        self.clock = self.work = start
        self.outgoing = self.incoming = 0.0
        self.left: list[float] = []
        """When each of its sends has left it."""
        self.arrived: dict[int, deque[float]] = {}
        """When messages that nobody has waited for yet were there, by source."""
        self.waits_for: int | None = None
        self.done = False

    def busy(self, seconds: float) -> None:
        self.clock += seconds
        self.work += seconds


def replay(traces: Sequence[Trace], scale: Scale, network: Network, prices: Prices) -> Replayed:
    """One step, from the traces of all its ranks."""
    return _Replay(traces, scale, network, prices).run()


class _Replay:
    def __init__(self, traces: Sequence[Trace], scale: Scale, network: Network, prices: Prices) -> None:
        self.scale, self.network, self.prices, self.world = scale, network, prices, len(traces)
        self.overhead = (network.overhead or 0.0) / 2
        self.ranks = [_Rank(trace, prices.before) for trace in traces]
        self.bytes = self.control = self.words = 0.0
        self.messages = 0
        self.under_way: list[tuple[float, int, int, int, float]] = []
        """A heap: when a message comes to its receiver's link, its number, source, destination, and size."""
        self.in_ring: list[int] = []

    def run(self) -> Replayed:
        for number in range(self.world):
            self._go_on(number)
        while self.under_way:
            time, _, source, destination, size = heapq.heappop(self.under_way)
            self._deliver(time, source, destination, size)
        stuck = [number for number, rank in enumerate(self.ranks) if not rank.done]
        if stuck:
            raise SimulationError(f"the recorded step does not end: rank {stuck[0]} waits for a message")
        return Replayed(
            seconds=max(rank.clock for rank in self.ranks),
            work_seconds=sum(rank.work for rank in self.ranks) / self.world,
            sent_bytes=(self.bytes + self.control) / self.world,
            control_bytes=self.control / self.world,
            words=self.words / self.world,
            messages=self.messages / self.world,
        )

    def _go_on(self, number: int) -> None:
        """Do what a rank does until it waits for a message."""
        rank = self.ranks[number]
        for kind, *numbers in rank.events:
            if kind == RECEIVE:
                if not self._receive(rank, numbers[0]):
                    return
            elif kind == FLUSH:
                rank.clock = max(rank.clock, rank.left[numbers[0]])
            elif kind == RING:
                if not self._join_ring(number, *numbers[:3]):
                    return
            elif kind in WORK:
                rank.busy(self.prices.work(kind, numbers[0], numbers[1] * self.scale.factor))
            else:
                self._send(number, kind, *numbers)
        rank.busy(self.prices.after)
        rank.done = True

    def _send(self, source: int, kind: int, peer: int, recorded: int, parts: int, entries: int, span: int) -> None:
        size: float = recorded
        if kind == CONTROL:
            self.control += size
        else:
            size = self.scale.message_bytes(recorded, parts, entries, span)
            self.bytes += size
            self.words += self.scale.message_words(recorded, parts, entries)
        self.messages += 1
        rank = self.ranks[source]
        rank.busy(self.overhead)
        start = max(rank.clock, rank.outgoing)
        rank.outgoing = start + size / self.network.bandwidth
        rank.left.append(rank.outgoing)
        heapq.heappush(self.under_way, (start + self.network.latency, self.messages, source, peer, size))

    def _deliver(self, time: float, source: int, destination: int, size: float) -> None:
        rank = self.ranks[destination]
        rank.incoming = max(time, rank.incoming) + size / self.network.bandwidth
        rank.arrived.setdefault(source, deque()).append(rank.incoming)
        if rank.waits_for == source and self._receive(rank, source):
            self._go_on(destination)

    def _receive(self, rank: _Rank, source: int) -> bool:
        """Whether the next message of that source is there; if not, the rank waits for it."""
        queue = rank.arrived.get(source)
        if queue is None:
            rank.waits_for = source
            return False
        rank.waits_for = None
        rank.clock = max(rank.clock, queue.popleft())
        rank.busy(self.overhead)
        if not queue:
            del rank.arrived[source]
        return True

    def _join_ring(self, number: int, entries: int, width: int, control: int) -> bool:
        """A library's allreduce: whether all ranks have come to it, so that it can be gone through."""
        if self.world == 1:
            return True
        self.in_ring.append(number)
        if len(self.in_ring) < self.world:
            return False
        self.in_ring.clear()
        entries = entries if control else round(entries * self.scale.factor)
        self._ring(entries, width)
        moved = 2.0 * entries * width * (self.world - 1)
        self.messages += 2 * (self.world - 1) * self.world
        if control:
            self.control += moved
        else:
            self.bytes += moved
            self.words += moved / 4
        for other in range(self.world):
            if other != number:
                self._go_on(other)
        return True

    def _ring(self, entries: int, width: int) -> None:
        """Reduce-scatter, then all-gather: in each of 2(P-1) rounds a P-th of it goes to the next rank."""
        ranks = self.ranks
        clock, outgoing, incoming = (
            np.array([getattr(rank, name) for rank in ranks]) for name in ("clock", "outgoing", "incoming")
        )
        seconds = entries / self.world * width / self.network.bandwidth
        adding = entries / self.world * self.prices.add_entry
        for turn in range(2 * (self.world - 1)):
            start = np.maximum(clock + self.overhead, outgoing)
            outgoing = start + seconds
            incoming = np.maximum(np.roll(start, 1) + self.network.latency, incoming) + seconds
            clock = np.maximum(clock, incoming) + self.overhead + (adding if turn < self.world - 1 else 0.0)
        for rank, now, out, in_ in zip(ranks, clock.tolist(), outgoing.tolist(), incoming.tolist(), strict=True):
            rank.clock, rank.outgoing, rank.incoming = now, out, in_
            rank.work += (self.world - 1) * (adding + 4 * self.overhead)
