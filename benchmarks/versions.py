"""Step times of two versions of oktopk, in turns (ABAB …), as paired ratios.

    python benchmarks/versions.py OTHER/.venv/bin/oktopk                            2 and 4 ranks, two links
    python benchmarks/versions.py OTHER/.venv/bin/oktopk --turns 12 --ranks 2 --link none --json out.json

Every turn runs `oktopk bench` once with each version, in changing order, with the same options; a turn gives one
ratio new/old of the median step time. Printed are the median of these ratios and its 95 % interval (order
statistics of the sign test). Results are written as they come; a run that was interrupted goes on where it ended.
Links need root, as in `oktopk bench`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

TIMEOUT = 900


def bench(program: str, arguments: list[str], names: list[str]) -> dict[str, float]:
    """Median seconds of a step, by link and contender."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [program, "bench", *arguments, "--contenders", ",".join(names), "--json"]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT).stdout
    records = json.loads(printed)["records"]
    return {f"{record['link']} {record['name']}": record["median_step_seconds"] for record in records}


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median.

    >>> interval([1.0, 1.01, 1.02, 1.03, 1.04, 1.05])
    (1.0, 1.05)
    """
    n, tail, rank = len(ratios), 0.0, 0
    while rank < n // 2 and (tail := tail + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    ordered, rank = sorted(ratios), max(0, rank - 1)
    return ordered[rank], ordered[n - 1 - rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the `oktopk` command of the other version")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--link", default="none,1gbit", help="as for `oktopk bench` (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contenders", default="oktopk:fp16")
    parser.add_argument("--more", default="", help="other options of `oktopk bench`, as one word")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/versions.json"), help="where results go")
    given = parser.parse_args()
    here = str(Path(sys.executable).with_name("oktopk"))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = json.loads(given.json.read_text()) if given.json.exists() else {}
    names = given.contenders.split(",")
    for turn in range(given.turns):
        for ranks in given.ranks:
            if any(len(ratios) > turn for cell, ratios in found.items() if cell.startswith(f"{ranks} ranks")):
                continue
            arguments = [
                "--ranks",
                str(ranks),
                "--link",
                given.link,
                "--steps",
                str(given.steps),
                *given.more.split(),
            ]
            order = [here, given.other] if turn % 2 else [given.other, here]
            times = {program: bench(program, arguments, names) for program in order}
            for cell, seconds in times[here].items():
                found.setdefault(f"{ranks} ranks, {cell}", []).append(seconds / times[given.other][cell])
            given.json.write_text(json.dumps(found, indent=1))
    for cell, ratios in found.items():
        low, high = interval(ratios)
        print(f"{cell:40} new/old {median(ratios):.3f}  [{low:.3f}, {high:.3f}]  {len(ratios)} turns")


if __name__ == "__main__":
    main()
