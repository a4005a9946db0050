"""The command: `make chaos`, or `python -m stress.chaos.run --case 1234` for one case once more.

It runs random cases on threads and on processes, shows how they went by fault, and fails if one of them hung, came
to a wrong result, ended with an error that does not say enough, or left something behind.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from tqdm import tqdm

from oktopk.tools.lab import lab_problem
from oktopk.tools.tables import format_table
from stress.chaos import on_processes, on_threads
from stress.chaos.cases import FAULTS_PER_JOB
from stress.chaos.judging import ENDED, HANG, LEAK, MISSED, WENT_ON, WRONG, Verdict
from tests.support import worlds


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2400, help="cases on threads (default: 2400)")
    parser.add_argument("--processes", type=int, default=80, help="cases on processes (default: 80)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: 0)")
    parser.add_argument("--case", type=int, help="this case on threads, and no other")
    parser.add_argument("--process-case", type=int, help="this case on processes, and no other")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all cases went well."""
    options = arguments().parse_args(argv)
    threads, processes = chosen(options)
    logging.disable(logging.CRITICAL)  # skipped steps, and the like
    verdicts = [
        *(thread_verdicts(threads) if threads else ()),
        *(process_verdicts(processes) if processes else ()),
    ]
    print(summary(verdicts))
    return int(any(verdict.went not in (ENDED, WENT_ON) for verdict in verdicts))


def chosen(options: argparse.Namespace) -> tuple[range, range]:
    """The numbers of the cases on threads, and on processes."""
    if options.case is not None or options.process_case is not None:
        one, other = options.case, options.process_case
        return (
            range(0) if one is None else range(one, one + 1),
            range(0) if other is None else range(other, other + 1),
        )
    first = options.first
    return range(first, first + options.threads), range(first, first + options.processes)


def summary(verdicts: Sequence[Verdict]) -> str:
    """By fault, and of all; `late` is how long after the fault and the timeout the last error came, at most."""
    columns = {
        "named error": ENDED,
        "went on": WENT_ON,
        "hangs": HANG,
        "wrong": WRONG,
        "leaks": LEAK,
        "not struck": MISSED,
    }
    kinds = {
        kind: [one for one in verdicts if one.kind == kind] for kind in sorted({one.kind for one in verdicts})
    }
    rows = []
    for kind, its in (kinds | {"all": verdicts}).items():
        counts, late = Counter(one.went for one in its), max(one.late for one in its)
        rows.append(
            [
                kind,
                len(its),
                *(counts[went] for went in columns.values()),
                f"{late:.1f}" if late > -math.inf else "",
            ]
        )
    return format_table(["fault", "cases", *columns, "late (s)"], rows)


# Threads: in as many processes as there are cores, each with a core of its own, where threads quarrel less.


def thread_verdicts(numbers: range) -> Iterator[Verdict]:
    jobs = [list(cases) for _, cases in itertools.groupby(numbers, lambda number: number // FAULTS_PER_JOB)]
    cores = multiprocessing.get_context("spawn").Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), settle_down, (cores,)) as pool:
        answers = pool.map(thread_cases, jobs)
        yield from shown((verdict for several in answers for verdict in several), len(numbers), "threads")


def settle_down(cores: multiprocessing.Queue[int]) -> None:
    os.sched_setaffinity(0, {cores.get()})
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def thread_cases(numbers: Sequence[int]) -> list[Verdict]:
    return [on_threads.examine(number) for number in numbers]


def process_verdicts(numbers: range) -> Iterator[Verdict]:
    transports = ["gloo"]
    if worlds.has_mpi():
        transports.append("mpi")
    if (problem := lab_problem()) is None:
        transports.append("lab")
    else:
        print(f"no network namespaces: {problem}", file=sys.stderr)
    with on_processes.marked():
        cases = (on_processes.examine(number, transports) for number in numbers)
        yield from shown(cases, len(numbers), "processes")


def shown(verdicts: Iterable[Verdict], total: int, where: str) -> Iterator[Verdict]:
    with tqdm(total=total, unit="case", desc=where, disable=None, dynamic_ncols=True) as bar:
        for verdict in verdicts:
            bar.update()
            if verdict.went not in (ENDED, WENT_ON):
                bar.write(f"case {verdict.number} ({verdict.kind}): {verdict.went}: {verdict.what}\n")
            yield verdict


if __name__ == "__main__":
    sys.exit(main())
