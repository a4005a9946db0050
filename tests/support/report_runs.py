"""Folders of runs for the tests of the report, written by the sink that writes real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oktopk.metrics.events import DENSE, SPARSE, ReductionEvent, Seconds, StepEvent, Volume, Wire, combine
from oktopk.metrics.sinks import JSONLSink
from oktopk.metrics.traffic import Operation, Traffic
from oktopk.tools.report.html.live import Server

SIZE, K = 1000, 10
"""Entries of a bucket, and how many of them are asked for."""
EXPOSED, FORWARD, BACKWARD, STEP = 0.15, 0.5, 0.7, 1.5
"""Seconds of the main thread. A bucket takes the worker 0.2 s; backward ends when 0.1 s of the last are left."""
SPARSE_SECONDS = Seconds(select=0.04, encode=0.02, exchange=0.06, decode=0.02, wait=0.04, other=0.02)
DENSE_SECONDS = Seconds(exchange=0.18, other=0.02)
HOSTILE = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script><b>&lt;%{y}'


def traffic(phase: str, world: int) -> dict[Operation, Traffic]:
    others = world - 1
    if phase == DENSE:
        ring, rounds = 2 * 4 * SIZE * others // world, 2 * others
        sizes = {(ring // rounds).bit_length() - 1: rounds} if rounds else {}
        return {Operation("all_reduce", "dense"): Traffic(ring, ring, rounds, rounds, 0.18, True, sizes)}
    return {
        Operation("all_to_all", "split"): Traffic(
            70 * others, 70 * others, others, others, 0.05, sizes={6: others}
        ),
        Operation("all_gather", "gather"): Traffic(130 * others, 0, others, 0, 0.04, sizes={7: others}),
        Operation("all_gather", "counts", control=True): Traffic(
            8 * others, 0, others, 0, 0.01, sizes={3: others}
        ),
    }


def reduction(step: int, bucket: int, phase: str, world: int, at: float) -> ReductionEvent:
    moved = traffic(phase, world)
    return ReductionEvent(
        step=step,
        bucket=bucket,
        phase=phase,
        algorithm="oktopk" if phase == SPARSE else DENSE,
        volume=Volume.of(SIZE, K if phase == SPARSE else None),
        target_count=K if phase == SPARSE else SIZE,
        local_count=K + 1 if phase == SPARSE else SIZE,
        threshold=0.5 if phase == SPARSE else 0.0,
        global_threshold=0.25 if phase == SPARSE else 0.0,
        exact=False,
        residual_norm=3.0 if phase == SPARSE else 0.0,
        wire=Wire.of(moved),
        seconds=SPARSE_SECONDS if phase == SPARSE else DENSE_SECONDS,
        slowest_rank=None,
        skipped=False,
        start=at,
        stop=at + 0.2,
        traffic=moved,
    )


def event(step: int, phase: str, world: int, buckets: int, culprits: tuple[str, ...] = ()) -> StepEvent:
    at = 100.0 * step
    parts = [reduction(step, bucket, phase, world, at + 0.2 * bucket) for bucket in range(buckets)]
    stop = at + 0.2 * buckets
    times = {"start": at, "handed_over": stop - 0.1, "stop": stop}
    return combine(step, parts, skipped=bool(culprits), culprits=culprits, **times)


def train_row(step: int, phase: str, **more: Any) -> dict[str, Any]:
    seconds = {"data_seconds": 0.05, "forward_seconds": FORWARD, "backward_seconds": BACKWARD}
    seconds |= {"exposed_seconds": EXPOSED, "update_seconds": 0.03, "step_seconds": STEP}
    return (
        {"epoch": step // 10, "phase": phase, "loss": 7.0 - 0.01 * step, "samples": 8, "skipped": False}
        | seconds
        | more
    )


def write_run(
    folder: Path,
    steps: int = 24,
    warmup: int = 8,
    world: int = 3,
    buckets: int = 2,
    skipped: dict[int, str] | None = None,
    **about: Any,
) -> Path:
    """A finished run with a validation at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    write_steps(folder, 0, steps, warmup, world, buckets, skipped)
    algorithm = "oktopk" if warmup < steps else "dense"
    plan = {
        "algorithm": algorithm,
        "world": world,
        "parameters": SIZE * buckets,
        "dense_steps": warmup,
        "steps": steps,
    }
    plan |= {"density": K / SIZE, "sentence": "a plan", "volume": ["so many bytes"], "warning": None}
    result = {"finished": True, "dnn": "net", "dataset": "data", "seed": 0, **plan, **about}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.toml").write_text('dnn = "net"  # command line\n')
    return folder


def write_steps(
    folder: Path,
    first: int,
    last: int,
    warmup: int,
    world: int,
    buckets: int,
    skipped: dict[int, str] | None = None,
) -> None:
    sink = JSONLSink(folder / "metrics.jsonl")
    for step in range(first, last):
        phase = DENSE if step < warmup else SPARSE
        culprit = (skipped or {}).get(step)
        sink.emit(event(step, phase, world, buckets, (culprit,) if culprit else ()))
        sink.add("train", step, train_row(step, phase, loss=None if culprit else 7.0 - 0.01 * step))
    sent = {phase: [1000.0 + rank for rank in range(world)] for phase in (DENSE, SPARSE)}
    sink.add("epoch", last, {"epoch": 0, "sent_bytes": sent, "phases": {phase: {"steps": 4} for phase in sent}})
    sink.add("validation", last, {"epoch": 0, "val loss": 6.5, "val WER": 1.25})
    sink.close()


@contextmanager
def served(run: Path) -> Iterator[Server]:
    """A live report of a run."""
    with Server([run]) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join(60)
