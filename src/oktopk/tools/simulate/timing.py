"""One process that times the work of a rank; `costs.py` runs as many at once as the cores will have ranks.

    python -m oktopk.tools.simulate.timing TASK

It times the real code: whole steps of a rank that is alone (selecting, the residual, the result), and the coding
of messages. Time is that of the processor, so that other programs do not count. What it found is JSON on stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from oktopk.algorithms import Algorithm, OkTopk, find_algorithm
from oktopk.comm import alone
from oktopk.kernels import backend
from oktopk.sparse import SparseVector
from oktopk.stopwatch import Stopwatch
from oktopk.tools.bench.gradients import Gradients
from oktopk.wire import Tag, ValueCode, decode, encode

from .record import AGE, Reducing

_STEPS, _SKIPPED, _REPEATS = 9, 2, 9
_FEW = 64


def main(task: Mapping[str, Any]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task["cores"]])
    torch.set_num_threads(1)
    for name in task["algorithms"]:
        _time_steps(name, Gradients(1 << 12, 0), 0.05)  # compiles
    gradients = Gradients(task["size"], 0)
    exact, steady = {}, {}
    for name in task["algorithms"]:
        exact[name], steady[name] = _time_steps(name, gradients, task["density"])
    return {"exact": exact, "steady": steady, "coding": _time_coding(gradients.buffer, task["density"])}


def _time_steps(name: str, gradients: Gradients, density: float) -> tuple[tuple[float, float], ...]:
    """Median seconds before and after communication: of steps that evaluate thresholds exactly, and of others."""
    algorithm = find_algorithm(name)
    exact = replace(algorithm, tau_prime=1) if isinstance(algorithm, OkTopk) else algorithm
    return tuple(_time_algorithm(one, gradients, density) for one in (exact, algorithm))


def _time_algorithm(algorithm: Algorithm, gradients: Gradients, density: float) -> tuple[float, float]:
    reducing, taken = Reducing(alone(), algorithm, gradients, density), []
    reducing.age(AGE)
    for step in range(AGE, AGE + _STEPS):
        reducing.prepare(step)
        watch, wall, start = Stopwatch(), time.perf_counter(), time.thread_time()
        reducing.reduce(step, watch)
        spent, share = time.thread_time() - start, watch.seconds("select") / (time.perf_counter() - wall)
        taken.append((share * spent, (1 - share) * spent))
    before, after = (statistics.median(part) for part in zip(*taken[_SKIPPED:], strict=True))
    return before, after


def _time_coding(work: torch.Tensor, density: float) -> dict[str, float]:
    """Seconds for each message and for each entry in it, from messages of few and of many entries."""
    size = work.numel()
    many = min(size, max(2 * _FEW, int(size * density)))
    small, large = (_time_message(work, count) for count in (_FEW, many))
    per_entry = [max(0.0, (b - a) / (many - _FEW)) for a, b in zip(small, large, strict=True)]
    per_part = [max(0.0, a - _FEW * entry) for a, entry in zip(small, per_entry, strict=True)]
    chunk = work[: max(1, size // 8)]
    return {
        "encode_part": per_part[0], "encode_entry": per_entry[0],
        "decode_part": per_part[1], "decode_entry": per_entry[1],
        "scatter_entry": _time_scatter(work, many) / many,
        "add_entry": _time(lambda: chunk.add_(chunk)) / chunk.numel(),
    }  # fmt: skip


def _time_message(work: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds to encode a message and to decode it."""
    size, part = work.numel(), _entries(work, count)
    tag = Tag(0, 0, 0, 0, size, 0, size)
    message, _ = encode(part, tag, ValueCode.FP32)
    return _time(lambda: encode(part, tag, ValueCode.FP32)), _time(lambda: decode(message, tag))


def _time_scatter(work: torch.Tensor, count: int) -> float:
    part = _entries(work, count)
    return _time(lambda: backend(work).scatter_add_(work, part.indices, part.values / 2))


def _entries(work: torch.Tensor, count: int) -> SparseVector:
    """So many of them, all over the tensor."""
    size = work.numel()
    places = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count].sort().values
    return SparseVector(places.to(torch.int32), torch.ones(count), size)


def _time(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.thread_time()
        run()
        taken.append(time.thread_time() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
