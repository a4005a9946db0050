"""Time a dense all-reduce against real sparse steps on this job's communicator."""

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
CANDIDATES = ((DENSE, "fp32"), ("oktopk", "fp32"), ("oktopk", "fp16"), ("topka", "fp32"), ("topka", "fp16"))
"""Algorithm, and value format on the wire."""
SMALL, PROBE, LARGEST = 1 << 12, 1 << 18, 1 << 24
WARM, REPEATS = 3, 5
"""Untimed and timed steps. The first steps compile kernels and evaluate thresholds over all entries."""
BUDGET = 20.0
"""Approximate time limit in seconds: larger models are measured on a part, and scaled."""


def time_steps(comm: Communicator, params: int, density: float, budget: float = BUDGET) -> dict[str, Any]:
    """Measure seconds and bytes of a step for each candidate, scaled from `entries` to `params`; the same on all
    ranks.
    """
    small = _time_candidates(comm, min(params, SMALL), density, REPEATS)
    probe = _time_candidates(comm, min(params, PROBE), density, repeats=1)
    entries = choose_entries(params, _total_seconds(small), _total_seconds(probe), budget)
    measured = _time_candidates(comm, entries, density, REPEATS)
    return {
        "entries": entries,
        "ways": [scale_times(*pair, entries, params) for pair in zip(small, measured, strict=True)],
    }


def _total_seconds(measured: list[dict[str, Any]]) -> float:
    return float(sum(one["seconds"] for one in measured))


def choose_entries(params: int, small: float, probe: float, budget: float) -> int:
    """Choose how many entries to measure within the budget, from the seconds for SMALL and PROBE entries."""
    seconds_per_entry = max(probe - small, 0.0) / (PROBE - SMALL)
    room = SMALL + (budget / (WARM + REPEATS) - small) / max(seconds_per_entry, 1e-12)
    return min(params, LARGEST, max(PROBE, int(room)))


def scale_times(small: dict[str, Any], measured: dict[str, Any], entries: int, params: int) -> dict[str, Any]:
    """Scale to the full size. The small step gives the fixed cost of the message rounds; only the rest grows."""
    if entries == params:
        return measured
    fixed = min(small["seconds"], measured["seconds"])
    grown = (measured["seconds"] - fixed) * (params - SMALL) / (entries - SMALL)
    return {**measured, "seconds": fixed + grown, "sent_bytes": measured["sent_bytes"] * params / entries}


def _time_candidates(comm: Communicator, size: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Time the candidates in turn, so that a disturbance affects all of them; the slowest rank counts."""
    gradients = Gradients(size, comm.rank)
    steps = [_make_step(comm, size, density, algorithm, values) for algorithm, values in CANDIDATES]
    taken: list[list[float]] = [[] for _ in CANDIDATES]
    sent = [0] * len(CANDIDATES)
    for number in range(WARM + repeats):
        for way, step in enumerate(steps):
            buffer = gradients.at(number)
            comm.all_gather_ints([number], PHASE)  # all ranks start together
            start = time.perf_counter()
            sent[way] = step(buffer, number)
            taken[way].append(time.perf_counter() - start)
    results = gather_json(comm, {"taken": [times[WARM:] for times in taken], "sent": sent}, PHASE)
    return [
        {
            "algorithm": algorithm,
            "values": values,
            **summarize([rank["taken"][way] for rank in results]),
            "sent_bytes": max(rank["sent"][way] for rank in results),
        }
        for way, (algorithm, values) in enumerate(CANDIDATES)
    ]


def summarize(taken: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the fastest step, by its slowest rank, and how many times longer the median step took."""
    steps = [max(ranks) for ranks in zip(*taken, strict=True)]
    return {"seconds": min(steps), "spread": statistics.median(steps) / min(steps)}


def _make_step(
    comm: Communicator, size: int, density: float, algorithm: str, values: str
) -> Callable[[Tensor, int], int]:
    """Make a function that averages the buffer over ranks and returns the bytes that this rank sent."""
    if algorithm == DENSE:
        meter = Metered(comm)  # counts the bytes of a ring

        def dense(buffer: Tensor, number: int) -> int:
            buffer.div_(comm.world)
            meter.all_reduce_(buffer, PHASE)
            return total(meter.pop_traffic()).sent_bytes

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
