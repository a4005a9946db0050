"""The bookkeeping of one reduction: opened when it starts, closed into its event."""

from __future__ import annotations

import time
from typing import Any

from ..comm import Metered
from ..metrics.events import ReductionEvent, Seconds, Volume, Wire
from ..metrics.stopwatch import Stopwatch
from ..wire.sparse_comm import SparseCommunicator

_LATE = 1e-3
"""Seconds between the first and the last rank from which on somebody counts as late."""

_NOTHING = {
    "local_count": 0,
    "threshold": 0.0,
    "global_threshold": 0.0,
    "exact": False,
    "residual_norm": 0.0,
}


class ReductionRecorder:
    """Takes the time and the traffic of one bucket in one step."""

    def __init__(self, meter: Metered, step: int, bucket: int, size: int) -> None:
        self.meter, self.step, self.bucket, self.size = meter, step, bucket, size
        self.start = time.perf_counter()
        self.watch = meter.stopwatch = Stopwatch()

    @property
    def exchange(self) -> float:
        return self.watch.seconds("exchange")

    def close(
        self,
        phase: str,
        algorithm: str,
        volume: Volume,
        wait: tuple[float, int | None] = (0.0, None),
        **facts: Any,
    ) -> ReductionEvent:
        """The event of the reduction, which ends now."""
        stop = time.perf_counter()
        waited, slowest = wait
        named = dict.fromkeys(("select", "encode", "exchange", "decode"), 0.0)
        for span in self.watch.spans:
            if span.name in named:
                named[span.name] += span.stop - span.start
        other = max(0.0, stop - self.start - sum(named.values()))
        named["exchange"] -= waited
        traffic = self.meter.take()
        return ReductionEvent(
            step=self.step, bucket=self.bucket, phase=phase, algorithm=algorithm, volume=volume,
            wire=Wire.of(traffic), seconds=Seconds(**named, wait=waited, other=other), slowest_rank=slowest,
            skipped=False, start=self.start, stop=stop, spans=tuple(self.watch.spans), traffic=traffic,
            **(_NOTHING | {"target_count": self.size} | facts),
        )  # fmt: skip


def lateness(channel: SparseCommunicator, exchange: float) -> tuple[float, int | None]:
    """(seconds this rank waited for ranks that came late, the rank that came last), if the messages tell.

    All ranks have told how long they were blocked. The last one to come was blocked only as long as the
    exchange itself takes; whatever the others were blocked longer, they waited for it.
    """
    if len(channel.blocked_received) < channel.world - 1 or channel.world == 1:
        return 0.0, None
    blocked = channel.blocked_received | {channel.rank: channel.blocked_sent}
    last = min(blocked, key=lambda rank: (blocked[rank], rank))
    if max(blocked.values()) - blocked[last] < _LATE:
        return 0.0, None
    return min(exchange, max(0.0, channel.blocked_sent - blocked[last])), last
