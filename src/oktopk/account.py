"""The bookkeeping of one reduction: opened when it starts, closed into its event."""

from __future__ import annotations

import time
from typing import Any

from .channel import Channel
from .comm import Metered, total
from .metrics import ReductionEvent, Seconds, Volume, Wire
from .stopwatch import Stopwatch

_LATE = 1e-3
"""Seconds between the first and the last rank from which on somebody counts as late."""

_NOTHING = {
    "local_count": 0,
    "threshold": 0.0,
    "global_threshold": 0.0,
    "exact": False,
    "residual_norm": 0.0,
}


class Account:
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
        named = {name: self.watch.seconds(name) for name in ("select", "encode", "exchange", "decode")}
        other = max(0.0, stop - self.start - sum(named.values()))
        named["exchange"] -= waited
        return ReductionEvent(
            step=self.step, bucket=self.bucket, phase=phase, algorithm=algorithm, volume=volume,
            wire=wire_of(self.meter), seconds=Seconds(**named, wait=waited, other=other), slowest_rank=slowest,
            skipped=False, start=self.start, stop=stop, spans=tuple(self.watch.spans),
            **(_NOTHING | {"target_count": self.size} | facts),
        )  # fmt: skip


def wire_of(meter: Metered) -> Wire:
    """What the meter has counted since it was last asked."""
    traffic = meter.take()
    everything = total(traffic)
    return Wire(
        everything.sent_bytes,
        everything.received_bytes,
        everything.sent_messages,
        everything.received_messages,
        control_bytes=total(traffic, lambda operation: operation.control).sent_bytes,
        modelled_bytes=sum(moved.sent_bytes for moved in traffic.values() if moved.modelled),
    )


def lateness(channel: Channel, exchange: float) -> tuple[float, int | None]:
    """(seconds this rank waited for ranks that came late, the rank that came last), if the messages tell.

    All ranks have told how long they were blocked. The last one to come was blocked only as long as the
    exchange itself takes; whatever the others were blocked longer, they waited for it.
    """
    if len(channel.heard) < channel.world - 1 or channel.world == 1:
        return 0.0, None
    blocked = channel.heard | {channel.rank: channel.told}
    last = min(blocked, key=lambda rank: (blocked[rank], rank))
    if max(blocked.values()) - blocked[last] < _LATE:
        return 0.0, None
    return min(exchange, max(0.0, channel.told - blocked[last])), last
