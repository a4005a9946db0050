"""What the benchmarks share: gradients that look like gradients, timing, tables, JSON."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from oktopk.tools.tables import table


class Gradients:
    """Heavy-tailed gradients that drift: layers of log-normal scale, a mean that all ranks share, own noise.

    The noise of a step is a window at a random place of one long draw, and a wandering factor scales the whole,
    so that no two steps are alike; residuals grow as a random walk, and steadily where the mean is large.
    """

    def __init__(self, size: int, rank: int, seed: int = 0, layers: int = 50) -> None:
        shared = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
        edges = torch.linspace(0, size, layers + 1).long()
        self.scale = torch.randn(layers, generator=shared).exp().repeat_interleave(edges.diff())
        self.mean = 0.3 * _heavy(size, shared)
        self.noise = _heavy(2 * size, own)
        self.offsets = torch.randint(0, size, (4096,), generator=own).tolist()
        self.buffer = torch.empty(size)

    def at(self, step: int) -> torch.Tensor:
        """The gradient of a step, in a buffer that the next call reuses."""
        offset = self.offsets[step % len(self.offsets)]
        drift = math.exp(0.3 * math.sin(step / 13) + 0.2 * math.sin(step / 5))
        torch.add(self.mean, self.noise[offset : offset + self.mean.numel()], out=self.buffer)
        return self.buffer.mul_(self.scale).mul_(drift)


def _heavy(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()


def seconds(run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Median wall time of run(), with before() called ahead of each, untimed."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def side_by_side(
    runs: dict[str, Callable[[], object]], repeats: int, before: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median seconds of each, taken in turns: what disturbs the machine disturbs all of them."""
    for run in runs.values():
        before()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run, 1, before))
    return {name: statistics.median(taken) for name, taken in times.items()}


def arguments(description: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "out" / f"{name}.json", help="where the figures go"
    )
    return parser


def report(headers: Sequence[str], measured: Iterable[tuple[list[list[object]], list[dict]]], path: Path) -> None:
    """Print one table of what was measured, each item rows and records, and write the records."""
    rows, records = [], []
    for new_rows, new_records in measured:
        rows += new_rows
        records += new_records
    print(table(headers, rows))
    write_json(path, records)


def write_json(path: Path, records: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    path.write_text(json.dumps({"machine": machine, "records": records}, indent=2) + "\n")
    print(f"\nwritten to {path}")
