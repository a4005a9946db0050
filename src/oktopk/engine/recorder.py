"""The one factory of reduction events: opened when a reduction starts, closed into its event."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ..comm import Metered
from ..metrics.events import ReductionEvent, Seconds, Volume, Wire, make_event
from ..metrics.traffic import Operation, Span, Stopwatch, Traffic, merge, total
from ..wire.sparse_comm import SparseCommunicator

_LATE = 1e-3
"""Seconds between the first and the last rank from which on the last one counts as a straggler."""
_STAGES = ("select", "encode", "exchange", "decode")


class ReductionRecorder:
    """Takes the time and the traffic of one bucket, or of one group, in one step.

    Reductions are recorded one after the other: what the meter has counted since the last one belongs to this one.
    """

    def __init__(self, meter: Metered, step: int, bucket: int, size: int, start: float | None = None) -> None:
        self._meter, self._step, self._bucket, self._size = meter, step, bucket, size
        self._start = time.perf_counter() if start is None else start
        self.watch = meter.stopwatch = Stopwatch()

    @property
    def exchange(self) -> float:
        """Seconds spent in communication so far."""
        return self.watch.seconds("exchange")

    def close(
        self, phase: str, algorithm: str, volume: Volume, comm: SparseCommunicator | None = None, **facts: Any
    ) -> ReductionEvent:
        """The event of the reduction, which ends now. `comm` tells who was late."""
        stop, (waited, slowest) = time.perf_counter(), (0.0, None) if comm is None else self._lateness(comm)
        named = {stage: self.watch.seconds(stage) for stage in _STAGES}
        other = max(0.0, stop - self._start - sum(named.values()))
        named["exchange"] -= waited
        traffic = self._meter.pop_traffic()
        return make_event(
            step=self._step, bucket=self._bucket, phase=phase, algorithm=algorithm, volume=volume,
            wire=Wire.of(traffic), seconds=Seconds(**named, wait=waited, other=other), slowest_rank=slowest,
            start=self._start, stop=stop, spans=tuple(self.watch.spans), traffic=traffic,
            **({"target_count": self._size} | facts),
        )  # fmt: skip

    def add_exchange(self, start: float, stop: float) -> None:
        """Time that a collective has taken, which nobody had to wait for."""
        self.watch.spans.append(Span("exchange", start, stop))

    def _lateness(self, comm: SparseCommunicator) -> tuple[float, int | None]:
        """(seconds this rank waited for stragglers, the rank that came last), if the messages tell.

        All ranks have sent how long they were blocked. The last one to come was blocked only as long as the
        exchange itself takes; whatever the others were blocked longer, they waited for it.
        """
        if len(comm.blocked_received) < comm.world - 1 or comm.world == 1:
            return 0.0, None
        blocked = comm.blocked_received | {comm.rank: comm.blocked_sent}
        last = min(blocked, key=lambda rank: (blocked[rank], rank))
        if max(blocked.values()) - blocked[last] < _LATE:
            return 0.0, None
        return min(self.exchange, max(0.0, comm.blocked_sent - blocked[last])), last


def add_traffic(event: ReductionEvent, traffic: dict[Operation, Traffic]) -> ReductionEvent:
    """The event with more traffic of its step, and the time that it took."""
    took = total(traffic).seconds
    return replace(
        event,
        stop=event.stop + took,
        seconds=event.seconds + Seconds(exchange=took),
        wire=event.wire + Wire.of(traffic),
        traffic=merge([event.traffic, traffic]),
    )
