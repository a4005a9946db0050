"""Events as flat rows: the same column names, with units, in every file and chart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..events import ReductionEvent, StepEvent, Volume, combine, make_event

Value = str | int | float | bool | None
"""None stands for a missing or non-finite number: JSON has no NaN, and an average must not contain one."""
Row = dict[str, Value]


def flat_step(event: StepEvent) -> Row:
    """The row of a step."""
    return _row(
        event, "step", {"buckets": len(event.reductions)},
        {
            "handed_over_seconds": event.handed_over,
            "exposed_seconds": event.exposed,
            "hidden_share": event.hidden_share,
            "culprits": "; ".join(event.culprits),
        },
    )  # fmt: skip


def flat_reduction(event: ReductionEvent) -> Row:
    """The row of one reduction."""
    return _row(
        event, "reduction", {"bucket": event.bucket, "algorithm": event.algorithm},
        {"threshold": event.threshold, "global_threshold": event.global_threshold, "exact": event.exact},
    )  # fmt: skip


def flat_traffic(event: StepEvent) -> list[dict[str, Any]]:
    """The traffic by operation. `sizes` counts messages by powers of two: "12" those of [4096, 8192) bytes."""
    return [
        {"operation": operation.name, "stage": operation.phase, "control": operation.control, **asdict(moved)}
        for operation, moved in event.traffic.items()
    ]


def _row(event: StepEvent | ReductionEvent, kind: str, identity: Row, rest: Row) -> Row:
    """What steps and reductions have in common, with the columns that only one kind has before and after."""
    volume, seconds = event.volume, event.seconds
    row: Row = {
        "event": kind,
        "step": event.step,
        "phase": event.phase,
        **identity,
        "size_entries": volume.size,
        "count": volume.count,
        "target_count": event.target_count,
        "local_count": event.local_count,
        "payload_bytes": volume.payload_bytes,
        "sparsity": volume.sparsity,
        "compression_ratio": volume.ratio,
        "target_density": event.target_density,
        "local_density": event.local_density,
        "global_density": event.global_density,
        "residual_norm": event.residual_norm,
        **vars(event.wire),
        **{f"{stage}_seconds": spent for stage, spent in vars(seconds).items()},
        "busy_seconds": seconds.total,
        "elapsed_seconds": event.stop - event.start,
        "slowest_rank": event.slowest_rank,
        "skipped": event.skipped,
        "start_seconds": event.start,
        "stop_seconds": event.stop,
        **rest,
    }
    return {name: finite(value) for name, value in row.items()}


def finite(value: Any) -> Any:
    """Replace every non-finite number in a value by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list) else value


_NOTHING: dict[str, Any] = {"skipped": False, "start": 0.0, "stop": 0.0}

STEP_COLUMNS = tuple(flat_step(combine(0, (), culprits=(), handed_over=0.0, **_NOTHING)))
_REDUCTION = make_event(step=0, bucket=0, phase="", algorithm="", volume=Volume(), target_count=0)
REDUCTION_COLUMNS = tuple(flat_reduction(_REDUCTION))

_MOMENTS = ("start_seconds", "handed_over_seconds", "stop_seconds")
LABELS = frozenset({"event", "step", "phase", "bucket", "algorithm", "slowest_rank", "culprits", *_MOMENTS})
"""Columns that identify an event: an average over them means nothing."""
