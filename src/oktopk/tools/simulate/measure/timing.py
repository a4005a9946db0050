"""Time the work of ranks in one process; `costs.py` runs as many at once as the cores will have ranks.

    python -m oktopk.tools.simulate.measure.timing TASK

It times the real code: the coding of messages, and whole steps of a few ranks, as threads that run in turn. The
result is the time of a step beyond its recorded work, which the replay cannot know. It is CPU time, so that other
programs do not count. The output is JSON on stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch

from oktopk.algorithms import Algorithm, OkTopk, find_algorithm
from oktopk.comm import Communicator, run_threads
from oktopk.tools.bench.gradients import Gradients

from ..trace.format import DECODE, WORK, RecordingCommunicator, Trace
from ..trace.processor import ProcessorWatch, TransportTimer
from ..trace.record import AGE, RankReducer, finish_trace, rank_gradients
from ..trace.replay import Prices
from .coding import time_coding
from .costs import Step

_STEPS, _SKIPPED = 9, 2
_RANKS = 4
"""More than one rank: a single rank would have the whole tensor as its region."""
_FEW, _MANY = 2, 8
"""Ranks of small steps, which give the fixed cost of a step and the cost per received part."""
_SMALL, _SMALL_DENSITY = 1 << 12, 0.05
_TIMEOUT = 600.0


def main(task: Mapping[str, Any]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task["cores"]])
    torch.set_num_threads(1)
    gradients, density = Gradients(task["size"], 0), task["density"]
    coding = time_coding(torch.zeros(task["size"]), density)
    exact, steady = {}, {}
    for name in task["algorithms"]:
        usual = find_algorithm(name)
        exact[name] = steady[name] = asdict(time_step(usual, gradients, density, coding))
        if isinstance(usual, OkTopk):
            exact[name] = asdict(time_step(replace(usual, tau_prime=1), gradients, density, coding))
    return {"exact": exact, "steady": steady, "coding": asdict(coding)}


@dataclass(frozen=True)
class StepCost:
    """One step of one rank: CPU seconds, and the number of decoded message parts."""

    select: float
    rest: float
    """Seconds besides selection, transport, and recorded work at its prices."""
    parts: float


def time_step(algorithm: Algorithm, gradients: Gradients, density: float, coding: Prices) -> Step:
    """Separate fixed and proportional cost: small steps give the fixed part, large steps the rest."""
    small = Gradients(_SMALL, 0)
    few, many = (time_ranks(algorithm, ranks, small, _SMALL_DENSITY, coding) for ranks in (_FEW, _MANY))
    large = time_ranks(algorithm, _RANKS, gradients, density, coding)
    part = max(0.0, many.rest - few.rest) / (many.parts - few.parts) if many.parts > few.parts else 0.0
    rest = max(0.0, few.rest - part * few.parts)
    size = gradients.buffer.numel()
    return Step(
        before=max(0.0, large.select - few.select) / size,
        after=max(0.0, large.rest - rest - part * large.parts) / size,
        fixed=few.select + rest,
        part=part,
    )


def time_ranks(algorithm: Algorithm, world: int, drawn: Gradients, density: float, coding: Prices) -> StepCost:
    """Time steps on `world` ranks: median over steps, mean over ranks."""

    def rank(comm: Communicator) -> list[StepCost]:
        with torch.no_grad():
            recorded = RecordingCommunicator(comm)
            outside = TransportTimer(recorded)
            reducing = RankReducer(outside, algorithm, rank_gradients(drawn, comm.rank), density)
            reducing.age(AGE)
            return [_time_one_step(reducing, recorded, outside, AGE + step, coding) for step in range(_STEPS)]

    by_rank = run_threads(world, rank, _TIMEOUT, in_turns=True)
    medians = [map(statistics.median, zip(*map(astuple, steps[_SKIPPED:]), strict=True)) for steps in by_rank]
    return StepCost(*map(statistics.mean, zip(*medians, strict=True)))


def _time_one_step(
    reducing: RankReducer, recorded: RecordingCommunicator, outside: TransportTimer, step: int, coding: Prices
) -> StepCost:
    reducing.prepare(step)
    watch, start = ProcessorWatch(), time.thread_time()
    reduction = reducing.reduce(step, watch)
    own = time.thread_time() - start - outside.take()
    trace, select = finish_trace(recorded, reduction), watch.seconds("select")
    return StepCost(select, own - select - price_work(trace, coding), _parts_decoded(trace))


def price_work(trace: Trace, coding: Prices) -> float:
    """Seconds of the recorded work; the replay adds it again for any number of ranks."""
    return sum(coding.work(*event[:3]) for event in trace.events() if event[0] in WORK)


def _parts_decoded(trace: Trace) -> int:
    return sum(event[1] for event in trace.events() if event[0] == DECODE)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
