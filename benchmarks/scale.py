"""Measure how time, CPU and memory of a step grow with the model: oktopk, plain DDP and backward alone.

Every size and contender runs in its own processes, so that the peak memory of a rank belongs to that contender.
The gradients are windows of a small pool. All ranks run on this machine, without a rate limit. The exit code is 1
if memory above plain DDP grows by more than the limit, between the first size from 25 million on and the largest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from common import arguments, write_json

from oktopk.cli.parsing import parse_count
from oktopk.tools.bench.launch import measure
from oktopk.tools.bench.names import BACKWARD, DDP
from oktopk.tools.bench.plan import Plan
from oktopk.tools.bench.records import Record
from oktopk.tools.tables import format_table

SIZES = (1_000_000, 5_000_000, 25_000_000, 100_000_000, 200_000_000)
ASKED_GROWTH, FROM = 4.4, 25_000_000
"""Bytes per parameter, of which the residual is 4."""
HEADERS = [
    *("parameters", "backward ms", "ddp ms", "oktopk ms", "above backward ms", "ns per parameter"),
    *("CPU ms above", "MB sent", "ddp peak MB", "oktopk peak MB", "bytes above ddp per parameter"),
]


def measured(size: int, options: argparse.Namespace) -> dict[str, Record]:
    """One record per contender, each from its own processes."""
    found = {}
    for name in (BACKWARD, DDP, options.name):
        plan = Plan(
            ((name,),), options.ranks, model="pooled", params=size, density=options.density, steps=options.steps,
            timeout=options.timeout,
        )  # fmt: skip
        ((found[name],),) = measure(plan, [])
    return found


def memory_above(found: Mapping[str, Record], name: str) -> int:
    return int(found[name]["peak_memory_bytes"] - found[DDP]["peak_memory_bytes"])


def row(size: int, found: Mapping[str, Record], name: str) -> list[object]:
    steps = {who: record["median_step_seconds"] for who, record in found.items()}
    above = steps[name] - steps[BACKWARD]
    cpu = found[name]["cpu_seconds"] - found[BACKWARD]["cpu_seconds"]
    peaks = [found[who]["peak_memory_bytes"] / 1e6 for who in (DDP, name)]
    return [
        f"{size:,}", *(1e3 * seconds for seconds in steps.values()), 1e3 * above, 1e9 * above / size, 1e3 * cpu,
        found[name]["sent_bytes"] / 1e6, *(f"{peak:,.0f}" for peak in peaks), memory_above(found, name) / size,
    ]  # fmt: skip


def growth(of_sizes: Mapping[int, Mapping[str, Record]], name: str) -> float | None:
    """Growth of memory above plain DDP in bytes per parameter; None if the sizes do not allow it."""
    known = sorted(size for size in of_sizes if size >= FROM)
    if len(known) < 2:
        return None
    small, large = known[0], known[-1]
    return (memory_above(of_sizes[large], name) - memory_above(of_sizes[small], name)) / (large - small)


def main() -> int:
    parser = arguments(__doc__ or "", "scale")
    parser.add_argument("--sizes", nargs="+", type=parse_count, default=SIZES)
    parser.add_argument("--name", default="oktopk:fp16", help="contender to measure beside ddp and backward")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each size and contender")
    options = parser.parse_args()
    of_sizes = {size: measured(size, options) for size in options.sizes}
    print(format_table(HEADERS, [row(size, found, options.name) for size, found in of_sizes.items()]))
    grows = growth(of_sizes, options.name)
    enough = None if grows is None else grows <= ASKED_GROWTH
    if grows is not None:
        says = f"grows by {grows:.2f} bytes per parameter, asked for ≤ {ASKED_GROWTH:g}"
        print(f"\nmemory above plain DDP {says}: {'yes' if enough else 'NO'}")
    verdict = {"figure": "bytes above DDP per parameter", "asked": ASKED_GROWTH, "found": grows, "enough": enough}
    records = [record for found in of_sizes.values() for record in found.values()]
    write_json(options.json, records, verdicts=[verdict])
    return int(enough is False)


if __name__ == "__main__":
    sys.exit(main())
