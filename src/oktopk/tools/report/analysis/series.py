"""Curves over the steps, thinned for charts: in a long run one point stands for several steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

from oktopk.metrics.events import SPARSE

from ..units import round_for_chart
from .phases import average, bounds
from .runs import Run, Step
from .times import STAGES, split_step

MOST_BUCKETS = 4
"""Number of buckets whose thresholds are drawn."""
Bins = Sequence[Sequence[Step]]


def make_bins(steps: Sequence[Step], most: int) -> list[Sequence[Step]]:
    """Group neighbouring steps into about `most` bins; no bin spans both phases.

    >>> [len(one) for one in make_bins([Step(n, "sparse" if n > 4 else "dense") for n in range(10)], 5)]
    [2, 2, 1, 2, 2, 1]
    """
    width = max(1, -(-len(steps) // most))
    parts = [list(part) for _, part in groupby(steps, key=lambda step: step.phase)]
    return [part[start : start + width] for part in parts for start in range(0, len(part), width)]


def series(run: Run, most: int) -> dict[str, Any]:
    """Compute the curves: means over the steps of each point, and for some also the lowest and highest step."""
    points = make_bins(run.steps, most)
    splits = [[split_step(step) for step in point] for point in points]
    limits = [[bounds(step, run.world) for step in point] for point in points]
    return {
        "steps_per_point": max(map(len, points), default=0),
        "step": [point[len(point) // 2].number for point in points],
        "phase": [point[0].phase for point in points],
        "loss": _spread(points, lambda step: step.train.get("loss")),
        "target_density": _means(points, _column("target_density")),
        "local_density": _spread(points, _column("local_density")),
        "global_density": _means(points, _column("global_density")),
        "sent_bytes": _spread(points, _column("sent_bytes")),
        "dense_bytes": [round_for_chart(average(limit["dense"] for limit in point)) for point in limits],
        "bound_6k_bytes": [round_for_chart(average(limit["6k"] for limit in point)) for point in limits],
        "bound_2k_bytes": [round_for_chart(average(limit["2k"] for limit in point)) for point in limits],
        "seconds": {
            stage: [
                round_for_chart(average(one.shown[stage] for one in point if one is not None)) for point in splits
            ]
            for stage in STAGES
        },
        "hidden_seconds": [
            round_for_chart(average(sum(one.hidden.values()) for one in point if one is not None))
            for point in splits
        ],
        "residual_norm": _means(points, lambda step: step.numbers.get("residual_norm") or None),
        "thresholds": _thresholds(points),
        "elapsed_seconds": _so_far(points, lambda step: step.train.get("step_seconds")),
        "sent_so_far_bytes": _so_far(points, _column("sent_bytes")),
    }


Figure = Callable[[Step], "float | None"]


def _column(name: str) -> Figure:
    return lambda step: step.numbers.get(name)


def _means(points: Bins, figure: Figure) -> list[float | None]:
    return [round_for_chart(average(map(figure, point))) for point in points]


def _spread(points: Bins, figure: Figure) -> dict[str, list[float | None]]:
    known = [[value for value in map(figure, point) if value is not None] for point in points]
    return {
        "mean": [round_for_chart(average(values)) for values in known],
        "low": [round_for_chart(min(values, default=None)) for values in known],
        "high": [round_for_chart(max(values, default=None)) for values in known],
    }


def _so_far(points: Bins, figure: Figure) -> list[float | None]:
    """Running sum up to the end of each point."""
    sums = [sum(figure(step) or 0.0 for step in point) for point in points]
    return [round_for_chart(total) for total in accumulate(sums)]


def _thresholds(points: Bins) -> list[dict[str, Any]]:
    """Thresholds of each bucket in sparse steps."""
    buckets = sorted({part.bucket for point in points for step in point for part in step.reductions})
    return [
        {
            "bucket": bucket,
            "local": _means(points, _threshold(bucket, "threshold")),
            "global": _means(points, _threshold(bucket, "global_threshold")),
        }
        for bucket in buckets[:MOST_BUCKETS]
    ]


def _threshold(bucket: int, name: str) -> Figure:
    def of(step: Step) -> float | None:
        parts = (part for part in step.reductions if part.bucket == bucket and part.phase == SPARSE)
        # 0 means that the algorithm has no threshold
        return next((part.numbers.get(name) or None for part in parts), None)

    return of
