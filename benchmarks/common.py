"""Shared by the benchmarks: timing, tables, JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from oktopk.tools.tables import format_table


def seconds(run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Median wall time of run(); before() runs untimed ahead of each call."""
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
    """Median seconds of each function, timed in turn, so that a disturbance affects all of them."""
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
    """Print one table of all rows, and write the records as JSON."""
    rows, records = [], []
    for new_rows, new_records in measured:
        rows += new_rows
        records += new_records
    print(format_table(headers, rows))
    write_json(path, records)


def write_json(path: Path, records: object, **more: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    path.write_text(json.dumps({"machine": machine, "records": records, **more}, indent=2) + "\n")
    print(f"\nwritten to {path}")
