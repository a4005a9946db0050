"""Measure the cost of metrics: the share of a step that the sinks and the stopwatch take.

Two ranks, as processes on this machine, reduce a model of ten buckets with all sinks on. The cost is timed inside
the step, because differences between whole steps are below the noise.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import arguments, write_json

import oktopk
from oktopk.metrics.events import MetricsSink, StepEvent
from oktopk.metrics.sinks import CSVSink, JSONLSink, MemorySink, TensorBoardSink, TraceSink, TrainerLists
from oktopk.metrics.traffic import Stopwatch
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.tables import format_table

HEADERS = ["", "µs per step", "share of a step"]
BUCKETS = 10
WORLD = 2


class Timed:
    """Wraps a sink and measures its time."""

    def __init__(self, inner: MetricsSink) -> None:
        self.inner, self.name = inner, type(inner).__name__
        self.seconds: list[float] = []

    def emit(self, event: StepEvent) -> None:
        start = time.perf_counter()
        self.inner.emit(event)
        self.seconds.append(time.perf_counter() - start)

    def close(self) -> None:
        self.inner.close()


class Trainer:
    pass


def sinks(folder: Path) -> list[Timed]:
    return [
        Timed(sink)
        for sink in (
            MemorySink(),
            TrainerLists(Trainer()),
            JSONLSink(folder / "metrics.jsonl"),
            CSVSink(folder / "steps.csv"),
            TensorBoardSink(folder / "events"),
            TraceSink(folder / "trace.json"),
        )
    ]


def span_seconds(repeats: int = 20_000) -> float:
    """Cost of one stage of the stopwatch."""
    watch = Stopwatch()
    start = time.perf_counter()
    for _ in range(repeats):
        with watch.stage("select"):
            pass
    return (time.perf_counter() - start) / repeats


def rank_main(rank: int, folder: str, size: int, steps: int, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    timed = sinks(Path(folder) / str(rank))
    gradients = Gradients(size, rank)
    names = [f"layer{index}" for index in range(BUCKETS)]
    parameters = {name: torch.zeros(size // BUCKETS) for name in names}
    for parameter in parameters.values():
        parameter.requires_grad_()
    taken, spans = [], []
    with oktopk.AllReducer(
        parameters.items(), warmup_steps=2, buckets=[[name] for name in names], sinks=timed, timeout=60
    ) as reducer:
        for step in range(steps):
            parts = gradients.at(step)[: size // BUCKETS * BUCKETS].chunk(BUCKETS)
            dist.barrier()
            start = time.perf_counter()
            reducer.sync(dict(zip(names, parts, strict=True)))
            taken.append(time.perf_counter() - start)
            spans.append(sum(len(reduction.spans) for reduction in reducer.last.reductions))
    if rank == 0:
        queue.put((taken, spans, {sink.name: sink.seconds for sink in timed}, span_seconds()))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__ or "", "metrics")
    parser.add_argument("--size", type=int, default=25_560_000, help="entries of the model")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, options.size, options.steps, queue))
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        taken, spans, sink_seconds, per_span = queue.get(timeout=300)
        for process in ranks:
            process.join(60)
    warm = options.steps // 4
    step = statistics.median(taken[warm:])
    costs = {name: statistics.median(seconds[warm:]) for name, seconds in sink_seconds.items()}
    costs["stopwatch"] = per_span * statistics.median(spans[warm:])
    costs["all of them"] = sum(costs.values())
    print(f"a sparse step of {options.size:,} entries in {BUCKETS} buckets, {WORLD} ranks: {1e3 * step:.0f} ms\n")
    print(
        format_table(HEADERS, [[name, 1e6 * cost, f"{100 * cost / step:.2f} %"] for name, cost in costs.items()])
    )
    write_json(options.json, [{"name": n, "seconds": c, "step_seconds": step} for n, c in costs.items()])


if __name__ == "__main__":
    main()
