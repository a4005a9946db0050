"""One process that times the work of ranks; `costs.py` runs as many at once as the cores will have ranks.

    python -m oktopk.tools.simulate.measure.timing TASK

It times the real code: the coding of messages, and whole steps of a few ranks, which are threads that take turns.
What a step takes beyond the work that `trace.py` records is what the replay cannot know. Time is that of the
processor, so that other programs do not count. What it found is JSON on stdout.
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

from ..trace.format import DECODE, WORK, Recorded, Trace
from ..trace.processor import Outside, ProcessorWatch
from ..trace.record import AGE, Reducing, finished, own_gradients
from ..trace.replay import Prices
from .coding import time_coding
from .costs import Step

_STEPS, _SKIPPED = 9, 2
_RANKS = 4
"""A rank that is alone has the whole tensor for its region, which no rank has when there are several."""
_FEW, _MANY = 2, 8
"""Ranks of small steps, which tell what a step costs whatever its size, and what each part it receives."""
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
class Spent:
    """A step of one rank: seconds of the processor, and how many parts of messages it has decoded."""

    select: float
    rest: float
    """Beyond selecting, the transport, and recorded work at its prices."""
    parts: float


def time_step(algorithm: Algorithm, gradients: Gradients, density: float, coding: Prices) -> Step:
    """What steps of small tensors cost is there for large ones too; what these cost more, grows with the size."""
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


def time_ranks(algorithm: Algorithm, world: int, drawn: Gradients, density: float, coding: Prices) -> Spent:
    """The median over steps, and the mean over ranks."""

    def rank(comm: Communicator) -> list[Spent]:
        with torch.no_grad():
            recorded = Recorded(comm)
            outside = Outside(recorded)
            reducing = Reducing(outside, algorithm, own_gradients(drawn, comm.rank), density)
            reducing.age(AGE)
            return [_spent(reducing, recorded, outside, AGE + step, coding) for step in range(_STEPS)]

    by_rank = run_threads(world, rank, _TIMEOUT, in_turns=True)
    medians = [map(statistics.median, zip(*map(astuple, steps[_SKIPPED:]), strict=True)) for steps in by_rank]
    return Spent(*map(statistics.mean, zip(*medians, strict=True)))


def _spent(reducing: Reducing, recorded: Recorded, outside: Outside, step: int, coding: Prices) -> Spent:
    reducing.prepare(step)
    watch, start = ProcessorWatch(), time.thread_time()
    reduction = reducing.reduce(step, watch)
    own = time.thread_time() - start - outside.take()
    trace, select = finished(recorded, reduction), watch.seconds("select")
    return Spent(select, own - select - priced(trace, coding), _parts_decoded(trace))


def priced(trace: Trace, coding: Prices) -> float:
    """What the recorded work comes to; the replay adds it again, for any number of ranks."""
    return sum(coding.work(*event[:3]) for event in trace.events() if event[0] in WORK)


def _parts_decoded(trace: Trace) -> int:
    return sum(event[1] for event in trace.events() if event[0] == DECODE)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
