"""γ: what the work of a rank costs on this machine, measured with as many ranks at once as its cores will have.

Every process times the real code: whole steps of a rank that is alone (selecting, the residual, the result), and
the coding of messages. `python -m oktopk.tools.simulate.costs` is one of them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oktopk.algorithms import find_algorithm
from oktopk.comm import alone
from oktopk.kernels import backend
from oktopk.sparse import SparseVector
from oktopk.stopwatch import Stopwatch
from oktopk.tools.bench.gradients import Gradients
from oktopk.wire import Tag, ValueCode, decode, encode

from .processes import run_all
from .record import Reducing
from .replay import Prices

LARGEST = 4_000_000
"""Entries of the tensor that is timed; beyond the caches, time grows in proportion."""
_MOST_CORES = 8
_STEPS, _SKIPPED, _REPEATS = 9, 2, 9
_FEW = 64
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Step:
    """Seconds for each entry of the tensor, of a rank that is alone, before and after it would communicate."""

    before: float
    after: float


@dataclass(frozen=True)
class Costs:
    """What was measured."""

    size: int
    ranks_per_core: int
    first: dict[str, Step]
    """By algorithm, the first step, which knows no threshold yet."""
    steady: dict[str, Step]
    coding: Prices

    def prices(self, algorithm: str, size: int, *, first: bool = False) -> Prices:
        step = (self.first if first else self.steady)[algorithm]
        return Prices(**asdict(self.coding) | {"before": step.before * size, "after": step.after * size})


def measure(algorithms: Sequence[str], size: int, density: float, ranks_per_core: int = 1) -> Costs:
    """Time the algorithms on as many processes at once as ranks would share the cores."""
    size = min(size, LARGEST)
    cores = min(_cores(), _MOST_CORES)
    task = json.dumps({"algorithms": list(algorithms), "size": size, "density": density, "cores": cores})
    said = run_all("oktopk.tools.simulate.costs", [task], [{}] * cores * ranks_per_core, _TIMEOUT)
    found = [json.loads(words) for words in said]
    steps = {
        when: {
            name: Step(*(_middle(one[when][name][part] for one in found) / size for part in range(2)))
            for name in algorithms
        }
        for when in ("first", "steady")
    }
    coding = Prices(**{name: _middle(one["coding"][name] for one in found) for name in found[0]["coding"]})
    return Costs(size, ranks_per_core, steps["first"], steps["steady"], coding)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _middle(numbers: Iterable[float]) -> float:
    return float(statistics.median(numbers))


# What each process does.


def main(task: Mapping[str, Any]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task["cores"]])
    torch.set_num_threads(1)
    for name in task["algorithms"]:
        _time_steps(name, Gradients(1 << 12, 0), 0.05)  # compiles
    gradients = Gradients(task["size"], 0)
    first, steady = {}, {}
    for name in task["algorithms"]:
        first[name], steady[name] = _time_steps(name, gradients, task["density"])
    return {"first": first, "steady": steady, "coding": _time_coding(gradients.buffer, task["density"])}


def _time_steps(name: str, gradients: Gradients, density: float) -> tuple[tuple[float, float], ...]:
    """Seconds before and after communication: of the first step, and the medians of later ones."""
    reducing, taken = Reducing(alone(), find_algorithm(name), gradients, density), []
    for step in range(_STEPS):
        reducing.prepare(step)
        watch, start = Stopwatch(), time.perf_counter()
        reducing.reduce(step, watch)
        whole, before = time.perf_counter() - start, watch.seconds("select")
        taken.append((before, whole - before))
    later = taken[_SKIPPED:]
    return taken[0], (_middle(before for before, _ in later), _middle(after for _, after in later))


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
        "add_entry": _time(lambda: chunk.add_(chunk)) / chunk.numel(),
    }  # fmt: skip


def _time_message(work: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds to encode a message, and to decode it and add it up, with its entries all over the tensor."""
    size = work.numel()
    places = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count].sort().values
    part, tag = SparseVector(places.to(torch.int32), torch.ones(count), size), Tag(0, 0, 0, 0, size, 0, size)
    message, _ = encode(part, tag, ValueCode.FP32)

    def receive() -> None:
        vector = decode(message, tag).vector
        backend(work).scatter_add_(work, vector.indices, vector.values / 2)

    return _time(lambda: encode(part, tag, ValueCode.FP32)), _time(receive)


def _time(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return _middle(taken)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
