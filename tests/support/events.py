"""Events for the tests of sinks, made up or drawn by hypothesis, and readers of what the sinks wrote."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from oktopk.metrics.events import DENSE, SPARSE, ReductionEvent, Seconds, Span, StepEvent, Volume, Wire, combine
from oktopk.metrics.sinks import CSVSink, JSONLSink, Sink, TraceSink

FILES: dict[str, Callable[[Path], Sink]] = {
    "jsonl": JSONLSink,
    "csv of steps": CSVSink,
    "csv of reductions": lambda path: CSVSink(path, of="reduction"),
    "trace": TraceSink,
}


def reduction(
    step: int = 0, bucket: int = 0, count: int | None = 10, at: float = 100.0, **facts: Any
) -> ReductionEvent:
    """One second of a bucket with 1000 entries."""
    known: dict[str, Any] = {
        "step": step,
        "bucket": bucket,
        "phase": DENSE if count is None else SPARSE,
        "algorithm": "dense" if count is None else "oktopk",
        "volume": Volume.of(1000, count),
        "target_count": 1000 if count is None else 10,
        "local_count": 1000 if count is None else 12,
        "threshold": 0.5,
        "global_threshold": 0.25,
        "exact": True,
        "residual_norm": 3.0,
        "wire": Wire(80, 70, 4, 3, 20, 0),
        "seconds": Seconds(0.1, 0.2, 0.3, 0.1, 0.2, 0.1),
        "slowest_rank": 2,
        "skipped": False,
        "start": at,
        "stop": at + 1.0,
        "spans": (
            Span("select", at, at + 0.1),
            Span("exchange", at + 0.1, at + 0.5),
            Span("copy", at + 0.5, at + 1),
        ),
    }
    return ReductionEvent(**(known | facts))


def step(number: int = 0, count: int | None = 10, buckets: int = 2, **facts: Any) -> StepEvent:
    at = 100.0 + 10 * number
    parts = [reduction(number, i, count, at + i) for i in range(buckets)]
    known = {"skipped": False, "culprits": (), "start": at, "handed_over": at + 1.5, "stop": at + max(buckets, 2)}
    return combine(number, facts.pop("reductions", parts), **(known | facts))


numbers = st.floats(-1e300, 1e300) | st.sampled_from([math.inf, -math.inf, math.nan])
seconds = st.builds(Seconds, *6 * [numbers])
names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20)


@st.composite
def steps(draw: st.DrawFn) -> StepEvent:
    number = draw(st.integers(0, 10**6))
    sizes = st.integers(0, 2**40)
    parts = [
        reduction(
            number,
            bucket,
            draw(st.none() | st.integers(0, 1000)),
            threshold=draw(numbers),
            global_threshold=draw(numbers),
            residual_norm=draw(numbers),
            seconds=draw(seconds),
            wire=draw(st.builds(Wire, *6 * [sizes])),
            slowest_rank=draw(st.none() | st.integers(0, 8)),
            algorithm=draw(names),
        )
        for bucket in range(draw(st.integers(0, 3)))
    ]
    culprits = tuple(draw(st.lists(names, max_size=3)))
    return step(number, reductions=parts, culprits=culprits, skipped=bool(culprits), stop=draw(numbers))


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
