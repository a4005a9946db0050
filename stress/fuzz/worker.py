"""One process of the fuzzer: judges the cases FIRST … LAST - 1, and tells on the way which one it is at.

    python -m stress.fuzz.worker FIRST LAST PLACE

PLACE is a file of eight bytes, which holds the number of the present case. What became of all goes to stdout.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import njit

from stress.fuzz.cases import Case, case
from stress.fuzz.corpus import corpus
from stress.fuzz.judge import judging
from stress.fuzz.results import Tally

ROOM = 2**29
"""Bytes of address space that decoding may add to what the process has: far more than any case needs."""
_MOST_FAILURES = 100


def main(first: int, last: int, place: Path) -> None:
    with judging() as judge:
        for number in range(8):  # every kernel is compiled before memory is limited
            judge.outcome(_unchanged(number))
        _limit_memory()

        def outcome(number: int) -> tuple[str, str, int]:
            made = case(number)
            return made.kind, judge.outcome(made), 1

        tell(first, last, place, outcome)


def tell(first: int, last: int, place: Path, outcome: Callable[[int], tuple[str, str, int]]) -> None:
    """Judge the cases by outcome(number): what was done, what became of it, and in how many operations."""
    if os.environ.get("NUMBA_BOUNDSCHECK") == "1":
        _check_that_bounds_are_checked()
    tally = Tally()
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 8) as present:
        parent = os.getppid()
        for number in range(first, last):
            struct.pack_into("<Q", present, 0, number)
            if os.getppid() != parent:  # nobody waits for the answer any more
                raise SystemExit(1)
            try:
                kind, found, operations = outcome(number)
                tally.counts[kind, found] += 1
                tally.operations += operations
            except Exception as error:  # whatever it is: it is no error of the library
                tally.failures.append((number, "", f"{type(error).__name__}: {error}"))
                if len(tally.failures) >= _MOST_FAILURES:
                    break
    tally.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(tally.to_json()))


def _unchanged(number: int) -> Case:
    real = corpus()[number * len(corpus()) // 8]
    return Case(number, "as it is", real.message, real.tag)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@njit
def _item(x, place):  # type: ignore[no-untyped-def]
    return x[place]


def _check_that_bounds_are_checked() -> None:
    try:
        _item(np.zeros(1), 5)
    except IndexError:
        return
    raise SystemExit("NUMBA_BOUNDSCHECK has no effect")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
