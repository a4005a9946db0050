"""The fuzzer: cases in processes of their own, so that a crash or a hang is seen and counted.

    python -m stress.fuzz.run --cases 1000000        messages for the decoder, a tenth with bounds checks
    python -m stress.fuzz.run --lying                whole reductions with a lying rank, likewise
    python -m stress.fuzz.run --case 1234            one case, in full; with --lying, one of those

A case has a number: `--first` goes on where an earlier run has ended. With `--out FILE` results are written as
they come, and the same command goes on with a run that was interrupted.

The exit code is 0 if every case was judged and none has failed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from stress.fuzz.results import Results, Slice, Tally

ROOT = Path(__file__).parents[2]
WORKER = (sys.executable, "-m", "stress.fuzz.worker")
LYING_WORKER = (sys.executable, "-m", "stress.fuzz.lying_worker")
CASES, LYING_CASES, REDUCTIONS = 1_000_000, 160_000, 200_000
"""So many jobs with a lying rank have at least so many reductions in which the lie was told."""
SLICE, LYING_SLICE = 50_000, 3_200
"""Cases of a process, at most: about a minute."""
CHECKED_SHARE = 10
"""One slice of so many has bounds checks."""
PATIENCE, START_PATIENCE = 30.0, 300.0
"""Seconds for one case, and for a process to begin: its kernels may have to be compiled."""
NOT_YET = 2**64 - 1


def judge_all(
    first: int,
    last: int,
    environment: Mapping[str, str] = os.environ,
    command: Sequence[str] = WORKER,
    patience: float = PATIENCE,
    tick: Callable[[int], None] = lambda done: None,
) -> Tally:
    """The cases first … last - 1. After a process that crashed or hung, others judge what is left of them."""
    tally, rest = Tally(), [(first, last)]
    while rest:
        begin, end = rest.pop()
        if begin >= end:
            continue
        found, culprit = _in_process(begin, end, environment, command, patience, tick)
        tally.add(found)
        if culprit is not None:
            rest += [(culprit + 1, end), (begin, culprit)]
    return tally


def _in_process(
    begin: int, end: int, environment: Mapping[str, str], command: Sequence[str], patience: float,
    tick: Callable[[int], None],
) -> tuple[Tally, int | None]:  # fmt: skip
    """What a process says of its cases; or the one case that it could not do."""
    with _place() as (path, present), tempfile.TemporaryFile() as said:
        arguments = [*command, str(begin), str(end), path]
        with subprocess.Popen(arguments, stdout=said, env=dict(environment), cwd=ROOT) as child:
            try:
                how = _watch(child, present, patience, lambda number: tick(number - begin))
            finally:
                child.kill()
        said.seek(0)
        if how is None:
            return Tally.from_json(json.loads(said.read())), None
        (number,) = struct.unpack("<Q", present[:8])
        if number == NOT_YET:
            raise SystemExit(f"{' '.join(arguments)} did not begin: {how}")
        return Tally(failures=[(number, "", how)]), number


def _watch(
    child: subprocess.Popen[bytes], present: mmap.mmap, patience: float, seen: Callable[[int], None]
) -> str | None:
    """How the process failed; None if it did not."""
    last, since = NOT_YET, time.monotonic()
    while True:
        try:
            code = child.wait(0.2)
        except subprocess.TimeoutExpired:
            (number,) = struct.unpack("<Q", present[:8])
            if number != last:
                last, since = number, time.monotonic()
                seen(number)
            elif time.monotonic() - since > (START_PATIENCE if last == NOT_YET else patience):
                return f"hung for {patience:g} s"
        else:
            return None if code == 0 else f"ended by {signal.Signals(-code).name}" if code < 0 else f"code {code}"


@contextmanager
def _place() -> Iterator[tuple[str, mmap.mmap]]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(struct.pack("<Q", NOT_YET))
        file.flush()
        with mmap.mmap(file.fileno(), 8) as present:
            yield file.name, present


# The command.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lying", action="store_true", help="whole reductions with a lying rank")
    parser.add_argument("--cases", type=int, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the first case")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="at a time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of JSON lines, for the results as they come")
    parser.add_argument("--case", type=int, metavar="NUMBER", help="do this case alone, and show it")
    options = parser.parse_args()
    if options.case is not None:
        return _show_lie(options.case) if options.lying else _show(options.case)
    start, wanted = time.monotonic(), options.cases or (LYING_CASES if options.lying else CASES)
    command = LYING_WORKER if options.lying else WORKER
    slices, results = slices_of(options.first, wanted, options.lying), Results(options.out)
    before = sum(results.known[place].cases for place in slices if place in results.known)
    judge_slices([place for place in slices if place not in results.known], options.processes, command, results)
    plain, checked = Tally(), Tally()
    for place in slices:
        (checked if place.checked else plain).add(results.known[place])
    print(text(plain, checked, options.lying))
    seconds, cases, failed = (
        time.monotonic() - start,
        plain.cases + checked.cases,
        plain.failures + checked.failures,
    )
    speed = f"{cases - before:,} cases in {seconds:.0f} s ({(cases - before) / seconds:,.0f} a second)"
    reductions = plain.operations + checked.operations
    if options.lying:
        print(f"{reductions:,} reductions in which the lie was told")
    print(f"{speed}{f' after {before:,} earlier' if before else ''}, {len(failed)} failed")
    if cases != wanted:
        print(f"{wanted:,} cases should have been judged")
    too_few = options.lying and options.cases is None and reductions < REDUCTIONS
    if too_few:
        print(f"{REDUCTIONS:,} reductions were wanted")
    return int(bool(failed) or cases != wanted or too_few)


def _show_lie(number: int) -> int:
    from stress.fuzz.lying import PATIENT, case, judge, run

    made = case(number)
    reports, liar = run(made, PATIENT)
    print(made, f"told: ranks {liar.told}", *(f"{len(r.steps)} steps, {r.error!r}" for r in reports), sep="\n")
    print(judge(made, reports, liar))
    return 0


def _show(number: int) -> int:
    from stress.fuzz.cases import case
    from stress.fuzz.judge import judging

    made = case(number)
    print(f"case {number}: {made.kind}\n{made.tag}\n{made.message.hex(' ', 8)}", flush=True)
    with judging() as judge:
        print(judge.outcome(made))
    return 0


def slices_of(first: int, cases: int, lying: bool) -> list[Slice]:
    """One of so many has bounds checks."""
    size, last = max(1, min(LYING_SLICE if lying else SLICE, cases // CHECKED_SHARE)), first + cases
    return [
        Slice(
            "lying" if lying else "messages",
            begin,
            min(begin + size, last),
            place % CHECKED_SHARE == CHECKED_SHARE - 1,
        )
        for place, begin in enumerate(range(first, last, size))
    ]


def judge_slices(slices: Sequence[Slice], processes: int, command: Sequence[str], results: Results) -> None:
    from tqdm import tqdm

    total = sum(place.end - place.begin for place in slices)
    with (
        tempfile.TemporaryDirectory() as cache,
        tqdm(total=total, unit="case", unit_scale=True, disable=None) as bar,
    ):
        with_checks = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}

        def judge(place: Slice) -> None:
            done = 0

            def tick(number: int) -> None:
                nonlocal done
                bar.update(max(0, number - done))
                done = max(done, number)

            environment = with_checks if place.checked else os.environ
            results.keep(place, judge_all(place.begin, place.end, environment, command, tick=tick))
            tick(place.end - place.begin)

        with ThreadPoolExecutor(processes) as pool:
            for done in as_completed([pool.submit(judge, place) for place in slices]):
                done.result()


def text(plain: Tally, checked: Tally, lying: bool = False) -> str:
    """A table of the cases by what was done to them and what became of them, and the failures."""
    from oktopk.tools.tables import format_table

    if lying:
        from stress.fuzz.lying import OUTCOMES as OUTCOMES

        heads = ["the lie", *OUTCOMES]
    else:
        from stress.fuzz.judge import OUTCOMES

        heads = ["done to the message", OUTCOMES[0], *(f"refused: {outcome}" for outcome in OUTCOMES[1:])]
    counts = plain.counts + checked.counts
    kinds = sorted({kind for kind, _ in counts})
    rows = [[kind, *(f"{counts[kind, outcome]:,}" for outcome in OUTCOMES)] for kind in kinds]
    rows.append(["all", *(f"{sum(counts[kind, outcome] for kind in kinds):,}" for outcome in OUTCOMES)])
    failed = [f"case {number} ({kind}): {what}" for number, kind, what in plain.failures + checked.failures]
    peak = max(plain.peak_bytes, checked.peak_bytes)
    about = f"{checked.cases:,} of them with bounds checks; at most {peak / 2**20:,.0f} MiB resident"
    return "\n".join([format_table(heads, rows), about, *failed])


if __name__ == "__main__":
    sys.exit(main())
