"""The command: `make chaos`, or `python -m stress.chaos.run --case 1234` for one case once more.

It runs random cases on threads and on processes, shows how they went by fault, and fails if one of them hung, came
to a wrong result, ended with an error that does not say enough, or left something behind.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from oktopk.tools.lab import lab_problem
from stress.chaos import on_processes, on_threads
from stress.chaos.cases import FAULTS_PER_JOB
from stress.chaos.judging import Verdict
from stress.chaos.process_cases import SETTINGS
from stress.chaos.results import GOOD, Results, latest, table
from tests.support import worlds

THREADS, PROCESSES = "threads", "processes"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2400, help="cases on threads (default: 2400)")
    parser.add_argument("--processes", type=int, default=280, help="cases on processes (default: 280)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: 0)")
    parser.add_argument("--case", type=int, help="this case on threads, and no other")
    parser.add_argument("--process-case", type=int, help="this case on processes, and no other")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="of the cases on processes; all"
    )
    parser.add_argument(
        "--out", type=Path, help="a file of JSON lines for the results; cases that it has are not repeated"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all cases went well."""
    options = arguments().parse_args(argv)
    numbers, results = chosen(options), Results(options.out)
    for where, its in numbers.items():
        missing = results.missing(where, its)
        if not missing:
            continue
        cases = thread_verdicts(missing) if where == THREADS else process_verdicts(missing, options.settings)
        show(results.kept(where, cases), len(missing), where)
    bad = False
    for where, its in numbers.items():
        verdicts = results.of(where, its)
        if verdicts:
            print(f"On {where}; {latest(verdicts)}:\n\n{table(verdicts)}\n")
        bad |= any(verdict.went not in GOOD for verdict in verdicts)
    return int(bad)


def chosen(options: argparse.Namespace) -> dict[str, range]:
    """The numbers of the cases on threads, and on processes."""
    if options.case is not None or options.process_case is not None:
        one = {THREADS: options.case, PROCESSES: options.process_case}
        return {where: range(number, number + 1) for where, number in one.items() if number is not None}
    first = options.first
    return {
        THREADS: range(first, first + options.threads), PROCESSES: range(first, first + options.processes)
    }  # fmt: skip


def show(verdicts: Iterable[Verdict], total: int, where: str) -> None:
    with tqdm(total=total, unit="case", desc=where, disable=None, dynamic_ncols=True) as bar:
        for verdict in verdicts:
            bar.update()
            if verdict.went not in GOOD:
                bar.write(f"case {verdict.number} ({verdict.kind}): {verdict.went}: {verdict.what}\n")


# Threads: in as many processes as there are cores, each with a core of its own, where threads quarrel less.


def thread_verdicts(numbers: Sequence[int]) -> Iterator[Verdict]:
    jobs = [list(cases) for _, cases in itertools.groupby(numbers, lambda number: number // FAULTS_PER_JOB)]
    cores = multiprocessing.get_context("spawn").Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), settle_down, (cores,)) as pool:
        for answer in as_completed([pool.submit(thread_cases, job) for job in jobs]):
            yield from answer.result()


def settle_down(cores: multiprocessing.Queue[int]) -> None:
    os.sched_setaffinity(0, {cores.get()})
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def thread_cases(numbers: Sequence[int]) -> list[Verdict]:
    return [on_threads.examine(number) for number in numbers]


def process_verdicts(numbers: Sequence[int], settings: Sequence[str]) -> Iterator[Verdict]:
    problem = lab_problem() if "lab" in settings else None
    if problem is not None:
        print(f"no network namespaces: {problem}", file=sys.stderr)
    absent = {"lab"} if problem is not None else set()
    if not worlds.has_mpi():
        absent.add("mpi")
    here = [name for name in settings if name not in absent]
    with on_processes.marked():
        for number in numbers:
            yield on_processes.examine(number, here)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # skipped steps, and the like
    sys.exit(main())
