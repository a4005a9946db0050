"""Replay a recorded step on the network model, as a discrete-event simulation.

Every rank has a clock and a full-duplex link. A rank processes its events until it has to wait for a message.
Messages reach the link of their receiver in order of time, and queue there.
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
    """γ: the costs of a rank's work, in seconds."""

    before: float = 0.0
    """Before the first message: accumulating the gradient and selecting."""
    after: float = 0.0
    """After the last message: the residual and the result."""
    encode_part: float = 0.0
    encode_entry: float = 0.0
    decode_part: float = 0.0
    decode_entry: float = 0.0
    scatter_entry: float = 0.0
    """Adding an entry of a sparse vector to a dense one."""
    add_entry: float = 0.0
    """Adding an entry of a dense vector, in the library's all-reduce."""

    def work(self, kind: int, parts: int, entries: float) -> float:
        """The cost of one recorded event."""
        if kind == ENCODE:
            return parts * self.encode_part + entries * self.encode_entry
        if kind == DECODE:
            return parts * self.decode_part + entries * self.decode_entry
        return entries * self.scatter_entry


@dataclass(frozen=True)
class ReplayedStep:
    """The result of a replayed step; bytes and work are means over ranks."""

    seconds: float
    """Time until the last rank finishes; all start together."""
    work_seconds: float
    sent_bytes: float
    control_bytes: float
    words: float
    """Words of four bytes, with one word per index, without control messages."""
    messages: float


class _Rank:
    """The state of a rank, and when its link is free."""

    def __init__(self, trace: Trace, start: float) -> None:
        self.events = trace.events()
        self.clock = self.work = start
        self.outgoing = self.incoming = 0.0
        self.left: list[float] = []
        """When each of its sends left."""
        self.arrived: dict[int, deque[float]] = {}
        """Arrival times of messages not yet received, by source."""
        self.waits_for: int | None = None
        self.done = False

    def busy(self, seconds: float) -> None:
        self.clock += seconds
        self.work += seconds


def replay(traces: Sequence[Trace], scale: Scale, network: Network, prices: Prices) -> ReplayedStep:
    """Replay one step from the traces of all its ranks."""
    return _Replay(traces, scale, network, prices).run()


class _Replay:
    def __init__(self, traces: Sequence[Trace], scale: Scale, network: Network, prices: Prices) -> None:
        self.scale, self.network, self.prices, self.world = scale, network, prices, len(traces)
        self.overhead = (network.overhead or 0.0) / 2
        self.ranks = [_Rank(trace, prices.before) for trace in traces]
        self.bytes = self.control = self.words = 0.0
        self.messages = 0
        self.under_way: list[tuple[float, int, int, int, float]] = []
        """A heap of messages: arrival at the receiver's link, number, source, destination, and size."""
        self.in_ring: list[int] = []

    def run(self) -> ReplayedStep:
        for number in range(self.world):
            self._advance(number)
        while self.under_way:
            time, _, source, destination, size = heapq.heappop(self.under_way)
            self._deliver(time, source, destination, size)
        stuck = [number for number, rank in enumerate(self.ranks) if not rank.done]
        if stuck:
            raise SimulationError(f"the recorded step does not end: rank {stuck[0]} waits for a message")
        return ReplayedStep(
            seconds=max(rank.clock for rank in self.ranks),
            work_seconds=sum(rank.work for rank in self.ranks) / self.world,
            sent_bytes=(self.bytes + self.control) / self.world,
            control_bytes=self.control / self.world,
            words=self.words / self.world,
            messages=self.messages / self.world,
        )

    def _advance(self, number: int) -> None:
        """Process the events of a rank until it waits for a message."""
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
            self._advance(destination)

    def _receive(self, rank: _Rank, source: int) -> bool:
        """Receive the next message of that source; returns False if the rank has to wait for it."""
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
        """Join the library's all-reduce; returns whether all ranks have joined, so that it is done."""
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
                self._advance(other)
        return True

    def _ring(self, entries: int, width: int) -> None:
        """Reduce-scatter, then all-gather: in each of 2(P-1) rounds 1/P of the data goes to the next rank."""
        ranks = self.ranks
        clock, outgoing, incoming = (
            np.array([getattr(rank, name) for rank in ranks]) for name in ("clock", "outgoing", "incoming")
        )
        seconds = entries / self.world * width / self.network.bandwidth
        adding = entries / self.world * self.prices.add_entry
        for round_ in range(2 * (self.world - 1)):
            start = np.maximum(clock + self.overhead, outgoing)
            outgoing = start + seconds
            incoming = np.maximum(np.roll(start, 1) + self.network.latency, incoming) + seconds
            clock = np.maximum(clock, incoming) + self.overhead + (adding if round_ < self.world - 1 else 0.0)
        for rank, now, out, in_ in zip(ranks, clock.tolist(), outgoing.tolist(), incoming.tolist(), strict=True):
            rank.clock, rank.outgoing, rank.incoming = now, out, in_
            rank.work += (self.world - 1) * (adding + 4 * self.overhead)
