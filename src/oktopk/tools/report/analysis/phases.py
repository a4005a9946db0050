"""Average the steps of each phase, and compute the bounds to compare them with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from oktopk.algorithms import ALGORITHMS
from oktopk.algorithms.volume import WORD_BYTES, least_words, oktopk_words, ring_words
from oktopk.metrics.events import DENSE, SPARSE

from .runs import Run, Step
from .times import GROUPS, mean, split_step

COLUMNS = ("target_density", "local_density", "global_density", "sent_bytes", "received_bytes", "sent_messages",
           "control_bytes", "modelled_bytes", "payload_bytes")  # fmt: skip


def average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def bounds(step: Step, world: int | None) -> dict[str, float | None]:
    """Bytes that a rank would send in this step: dense with a ring, and the bounds of 6k and 2k words. A dense
    bucket in a sparse step counts with the words of a ring.
    """
    size, k = step.numbers.get("size_entries"), step.numbers.get("target_count")
    limits: dict[str, float | None] = dict.fromkeys(("dense", "6k", "2k"))
    if world is None:
        return limits
    if size is not None:
        limits["dense"] = WORD_BYTES * ring_words(size, world)
    if k is not None and step.phase == SPARSE:
        dense = sum(part.numbers.get("size_entries", 0.0) for part in step.reductions if part.phase == DENSE)
        for name, words in (("6k", oktopk_words), ("2k", least_words)):
            limits[name] = WORD_BYTES * (words(k - dense, world) + ring_words(dense, world))
    return limits


def phases(run: Run) -> dict[str, dict[str, Any]]:
    """Average each phase, dense and sparse, that has a step."""
    of = {phase: [step for step in run.steps if step.phase == phase] for phase in (DENSE, SPARSE)}
    return {phase: _means(run, phase, steps) for phase, steps in of.items() if steps}


def _means(run: Run, phase: str, steps: Sequence[Step]) -> dict[str, Any]:
    limits = [bounds(step, run.world) for step in steps]
    sent, dense = (
        average(step.numbers.get("sent_bytes") for step in steps),
        average(limit["dense"] for limit in limits),
    )
    return {
        "steps": len(steps),
        "skipped": sum(step.skipped for step in steps),
        "loss": average(step.train.get("loss") for step in steps),
        **{name: average(step.numbers.get(name) for step in steps) for name in COLUMNS},
        "in_band_share": _in_band(run, steps) if phase == SPARSE else None,
        "dense_bytes": dense,
        "of_dense": sent / dense if sent is not None and dense else None,
        "bound_6k_bytes": average(limit["6k"] for limit in limits),
        "bound_2k_bytes": average(limit["2k"] for limit in limits),
        "sent_bytes_by_rank": _by_rank(run, phase),
        **_times(steps[1:] or steps),
    }


def band(run: Run) -> tuple[float, float]:
    """The algorithm's band: what a rank may send, relative to the target."""
    algorithm = ALGORITHMS.get(run.algorithm)
    return algorithm.band if algorithm is not None else (3 / 4, 5 / 4)


def _in_band(run: Run, steps: Sequence[Step]) -> float | None:
    low, high = band(run)
    ratios = [
        step.numbers["local_density"] / step.numbers["target_density"]
        for step in steps
        if "local_density" in step.numbers and step.numbers.get("target_density", 0) > 0
    ]
    return sum(low <= ratio <= high for ratio in ratios) / len(ratios) if ratios else None


def _times(steps: Sequence[Step]) -> dict[str, Any]:
    """Average the times; the caller leaves out the first step, which compiles kernels and opens connections."""
    whole = mean(one for one in map(split_step, steps) if one is not None)
    if whole is None:
        nothing: dict[str, Any] = {"seconds": {}, "hidden_seconds": {}, "shares": {}}
        return nothing | dict.fromkeys(("step_seconds", "reduction_seconds", "hidden_work_share"))
    hidden = sum(whole.hidden.values())
    busy = hidden + sum(whole.shown[stage] for stage in whole.hidden)
    shares = {
        group: sum(whole.shown[stage] for stage in stages) / whole.step if whole.step > 0 else None
        for group, stages in GROUPS.items()
    }
    return {
        "step_seconds": whole.step,
        "seconds": dict(whole.shown),
        "hidden_seconds": dict(whole.hidden),
        "reduction_seconds": busy,
        "shares": shares,
        "hidden_work_share": hidden / busy if busy > 0 else None,
    }


def _by_rank(run: Run, phase: str) -> list[float] | None:
    """Bytes that each rank sent per step, over the finished epochs."""
    finished = [epoch for epoch in run.epochs if phase in epoch.sent_bytes]
    ranks = min((len(epoch.sent_bytes[phase]) for epoch in finished), default=0)
    steps = sum(epoch.steps_by_phase.get(phase, 0.0) for epoch in finished)
    if not ranks or not steps:
        return None
    return [
        sum(epoch.steps_by_phase.get(phase, 0.0) * epoch.sent_bytes[phase][rank] for epoch in finished) / steps
        for rank in range(ranks)
    ]
