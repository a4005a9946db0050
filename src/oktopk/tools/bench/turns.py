"""One step of one contender on one rank, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from oktopk.metrics.events import StepEvent

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True)
class Reduced:
    """What our own reducers tell about a step; torch's hooks tell nothing."""

    sent_bytes: int | None = None
    modelled_bytes: int | None = None
    exposed: float | None = None
    hidden_share: float | None = None
    stages: dict[str, float] | None = None
    backward: float | None = None
    """Seconds until the last bucket was handed over."""

    @classmethod
    def of(cls, event: StepEvent, start: float) -> Reduced:
        return cls(
            event.wire.sent_bytes,
            event.wire.modelled_bytes,
            event.exposed,
            event.hidden_share,
            asdict(event.seconds),
            event.handed_over - start,
        )


@dataclass(frozen=True)
class Turn:
    """One step of one contender on one rank."""

    seconds: float
    cpu_seconds: float
    interface_bytes: int | None
    """Sent by this host while it lasted, as its interface has counted; None where there is no interface."""
    reduced: Reduced = Reduced()


def take_turn(
    run: Callable[[], object],
    in_lab: bool,
    tell: Callable[[float], Reduced] = lambda start: Reduced(),
    barrier: Callable[[], object] = dist.barrier,
) -> Turn:
    """What run() costs. Ranks begin it together, and leave together; tell() knows when it began."""
    barrier()
    before = _sent(in_lab)
    start, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    barrier()  # now what was sent has arrived, and is counted
    after = _sent(in_lab)
    moved = None if before is None or after is None else after - before
    return Turn(seconds, cpu, moved, tell(start))


def _sent(in_lab: bool) -> int | None:
    return int(_SENT.read_text()) if in_lab else None
