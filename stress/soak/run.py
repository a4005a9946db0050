"""The soak test: 20,000 steps of a small model on three processes over gloo, with everything a long run meets.

job.py is the program of the ranks. The exit code is 1 unless, after the first 1,000 steps, memory stays flat
(within 2 % of the resident size, without more Python objects, files or threads), replicas are identical at every
check, no gradient mass is lost, exactly the steps with non-finite values are skipped, and selections stay in the
band.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.common import arguments, write_json
from oktopk.algorithms import OkTopk
from oktopk.tools.bench.launch import run_on_loopback
from oktopk.tools.tables import format_table

SETTLED = 1000
"""Steps after which nothing may grow any more; half of them in a shorter run."""
GROWTH = {"resident_bytes": 0.02, "objects": 0.002, "files": 0.0, "threads": 0.0}
"""How much more there may be of each later on."""

Findings = dict[str, Any]
"""Of one rank: job.Findings."""


def growth(memory: list[dict[str, int]], name: str) -> float:
    """Relative growth: the maximum after the start-up phase over the value at its end, minus 1."""
    settled = min(SETTLED, memory[-1]["step"] // 2)
    first, *later = [look[name] for look in memory if look["step"] >= settled]
    return max(later) / first - 1


def measured(ranks: list[Findings]) -> list[tuple[str, float, float, float]]:
    """Each result with its limits; the worst of all ranks."""
    low, high = OkTopk.band
    grown = [
        (f"growth of {name.replace('_', ' ')}", max(growth(rank["memory"], name) for rank in ranks), -1.0, limit)
        for name, limit in GROWTH.items()
    ]
    return [
        *grown,
        ("looks with replicas that differ", max(rank["divergent"] for rank in ranks), 0, 0),
        ("missing mass, in units of rounding", max(rank["imbalance"] for rank in ranks), 0, 1),
        ("steps wrongly skipped or not", max(rank["wrongly_skipped"] for rank in ranks), 0, 0),
        ("fewest selected / k", min(rank["fewest"] for rank in ranks), low, high),
        ("most selected / k", max(rank["most"] for rank in ranks), low, high),
    ]


def misses(figures: list[tuple[str, float, float, float]]) -> list[str]:
    return [
        f"{name}: {value:.4g}, which must lie in [{low:g}, {high:g}]"
        for name, value, low, high in figures
        if not low <= value <= high
    ]


def describe(ranks: list[Findings]) -> str:
    first = ranks[0]
    resident = [rank["memory"][-1]["resident_bytes"] / 2**20 for rank in ranks]
    return (
        f"{first['steps']:,} steps on {len(ranks)} ranks, {1e3 * first['seconds'] / first['steps']:.1f} ms each: "
        f"{first['sparse_steps']:,} sparse at densities from {first['densest']:.3g} to {first['sparsest']:.3g}, "
        f"{first['skipped']} skipped, a head unused on some ranks in {first['partly_unused']:,} and on all in "
        f"{first['unused']:,}; {first['looks']} looks; {min(resident):.0f} to {max(resident):.0f} MB resident"
    )


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], "soak")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=4 * 3600.0, help="seconds")
    options = parser.parse_args()
    command = [sys.executable, "-m", "stress.soak.job", str(options.steps), str(options.seed)]
    ranks = json.loads(run_on_loopback(command, options.ranks, options.timeout, show=sys.stderr.isatty()))
    figures = measured(ranks)
    print(describe(ranks) + "\n")
    print(format_table(["", "found", "at least", "at most"], [list(figure) for figure in figures]))
    missed = misses(figures)
    write_json(options.json, ranks, figures={name: value for name, value, *_ in figures}, misses=missed)
    print("\n".join(["", *missed] if missed else ["", "all as it must be"]))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
