"""Time one step of one contender on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from oktopk.metrics.events import StepEvent
from oktopk.tools.lab.hosts import interface_sent_bytes


@dataclass(frozen=True)
class ReducerReport:
    """What our reducer reports about a step; empty for torch's hooks."""

    sent_bytes: int | None = None
    modelled_bytes: int | None = None
    exposed: float | None = None
    hidden_share: float | None = None
    stages: dict[str, float] | None = None
    backward: float | None = None
    """Seconds until the last bucket was submitted."""

    @classmethod
    def of(cls, event: StepEvent, start: float) -> ReducerReport:
        return cls(
            event.wire.sent_bytes,
            event.wire.modelled_bytes,
            event.exposed,
            event.hidden_share,
            asdict(event.seconds),
            event.handed_over - start,
        )


@dataclass(frozen=True)
class TimedStep:
    """One step of one contender on one rank."""

    seconds: float
    cpu_seconds: float
    interface_bytes: int | None
    """Bytes that this host's interface sent during the step; None without an interface."""
    reduced: ReducerReport = ReducerReport()


def time_step(
    run: Callable[[], object],
    in_lab: bool,
    report: Callable[[float], ReducerReport] = lambda start: ReducerReport(),
    barrier: Callable[[], object] = dist.barrier,
) -> TimedStep:
    """Time run(). The ranks start and leave together; report(start) returns what the reducer says."""
    barrier()
    before = interface_sent_bytes(in_lab)
    start, cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    barrier()  # now everything sent has arrived and is counted
    after = interface_sent_bytes(in_lab)
    moved = None if before is None or after is None else after - before
    return TimedStep(seconds, cpu, moved, report(start))
