"""Does compression pay here? A dense sum against real sparse steps, timed on this world's communicator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oktopk.collective import sparse_allreduce
from oktopk.comm import Communicator, Metered, gather_json
from oktopk.metrics.traffic import total
from oktopk.tools.bench.gradients import Gradients

PHASE = "doctor"
DENSE = "dense"
WAYS = ((DENSE, "fp32"), ("oktopk", "fp32"), ("oktopk", "fp16"), ("topka", "fp32"), ("topka", "fp16"))
"""Algorithm, and values on the wire."""
SMALL, PROBE, LARGEST = 1 << 12, 1 << 18, 1 << 24
WARM, REPEATS = 3, 5
"""Steps before the ones that count: the first compile kernels and evaluate thresholds over all entries."""
BUDGET = 20.0
"""Seconds that all of it may take, about: what takes longer is measured on a part, and scaled."""


def ways(comm: Communicator, params: int, density: float, budget: float = BUDGET) -> dict[str, Any]:
    """Seconds and bytes of a step by each way, the same on all ranks; scaled from `entries` to the asked size."""
    small = _timed(comm, min(params, SMALL), density, REPEATS)
    probe = _timed(comm, min(params, PROBE), density, repeats=1)
    entries = affordable(params, _all_ways(small), _all_ways(probe), budget)
    measured = _timed(comm, entries, density, REPEATS)
    return {
        "entries": entries,
        "ways": [scaled(*pair, entries, params) for pair in zip(small, measured, strict=True)],
    }


def _all_ways(measured: list[dict[str, Any]]) -> float:
    return float(sum(way["seconds"] for way in measured))


def affordable(params: int, small: float, probe: float, budget: float) -> int:
    """How many entries can be measured within the budget, from the seconds that SMALL and PROBE of them take."""
    seconds_per_entry = max(probe - small, 0.0) / (PROBE - SMALL)
    room = SMALL + (budget / (WARM + REPEATS) - small) / max(seconds_per_entry, 1e-12)
    return min(params, LARGEST, max(PROBE, int(room)))


def scaled(small: dict[str, Any], measured: dict[str, Any], entries: int, params: int) -> dict[str, Any]:
    """To the asked size. The rounds of messages take their time whatever the size: a small step tells how much,
    and only what comes on top of it grows."""
    if entries == params:
        return measured
    fixed = min(small["seconds"], measured["seconds"])
    grown = (measured["seconds"] - fixed) * (params - SMALL) / (entries - SMALL)
    return {**measured, "seconds": fixed + grown, "sent_bytes": measured["sent_bytes"] * params / entries}


def _timed(comm: Communicator, size: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """The ways take turns, so that what disturbs the machine disturbs all of them; the slowest rank counts."""
    gradients = Gradients(size, comm.rank)
    steps = [_stepper(comm, size, density, algorithm, values) for algorithm, values in WAYS]
    taken: list[list[float]] = [[] for _ in WAYS]
    sent = [0] * len(WAYS)
    for number in range(WARM + repeats):
        for way, step in enumerate(steps):
            buffer = gradients.at(number)
            comm.all_gather_ints([number], PHASE)  # nobody begins before the others are there
            start = time.perf_counter()
            sent[way] = step(buffer, number)
            taken[way].append(time.perf_counter() - start)
    told = gather_json(comm, {"taken": [times[WARM:] for times in taken], "sent": sent}, PHASE)
    return [
        {
            "algorithm": algorithm,
            "values": values,
            **best_of([rank["taken"][way] for rank in told]),
            "sent_bytes": max(rank["sent"][way] for rank in told),
        }
        for way, (algorithm, values) in enumerate(WAYS)
    ]


def best_of(taken: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the seconds of each rank in each step, the best step of the slowest rank, which other work on the machine
    disturbs least; and how many times longer a usual step took."""
    steps = [max(ranks) for ranks in zip(*taken, strict=True)]
    return {"seconds": min(steps), "spread": statistics.median(steps) / min(steps)}


def _stepper(
    comm: Communicator, size: int, density: float, algorithm: str, values: str
) -> Callable[[Tensor, int], int]:
    """A step that makes the buffer the mean over ranks; it tells the bytes that this rank sent."""
    if algorithm == DENSE:
        meter = Metered(comm)  # counts the bytes of a ring

        def dense(buffer: Tensor, number: int) -> int:
            buffer.div_(comm.world)
            meter.all_reduce_(buffer, PHASE)
            return total(meter.take()).sent_bytes

        return dense
    residual, state = torch.zeros(size), None

    def sparse(buffer: Tensor, number: int) -> int:
        nonlocal state
        _, info = sparse_allreduce(
            *(buffer, density, algorithm, residual, comm),
            values=values, out=buffer, state=state, step=number,
        )  # fmt: skip
        state = info.state
        return total(info.traffic).sent_bytes

    return sparse
