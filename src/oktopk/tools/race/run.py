"""Run the cells of a race one after the other, on loopback or in a lab; finished ones are kept and skipped."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oktopk.errors import OkTopkError
from oktopk.tools.bench.launch import run_on_loopback
from oktopk.tools.lab import JobFailed, JobTimeout, Lab

from .cells import CELLS, COMPILING, CellFolder, check_race
from .links import LOOPBACK, needs_lab
from .spec import QUALITY, TIMING, Cell, Race, Spec

JOB = (sys.executable, "-m", "oktopk.tools.race.job")
_LOOK_SECONDS = 0.5
Show = Callable[[str], object]


@dataclass(frozen=True)
class Failure:
    """A cell that failed, and why in one line; its folder has the rest."""

    cell: Cell
    problem: str


def plan_cells(contenders: Sequence[str], links: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed and link by link, so that there is something to compare early.

    >>> [cell.name for cell in plan_cells(["ddp", "oktopk"], ["100mbit"], [0])]
    ['ddp-100mbit-seed0', 'oktopk-100mbit-seed0']
    """
    return [Cell(name, link, seed) for seed in seeds for link in links for name in contenders]


def plan_composed(contenders: Sequence[str], links: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The cells whose times are composed: step times on every link, then quality by step for every seed.

    >>> [cell.name for cell in plan_composed(["ddp"], ["100mbit"], [0])]
    ['ddp-timing-100mbit-seed0', 'ddp-quality-seed0']
    """
    timed = [Cell(name, link, seeds[0], TIMING) for link in links for name in contenders]
    return [*timed, *(Cell(name, LOOPBACK, seed, QUALITY) for seed in seeds for name in contenders)]


def run_cells(
    race: Race,
    cells: Sequence[Cell],
    out: Path,
    timeout: float,
    show: Show,
    status: Show | None = None,
    job: Sequence[str] | None = None,
    on_change: Callable[[], object] = lambda: None,
) -> list[Failure]:
    """Run all cells that are not finished; returns those that failed.

    Args:
        race: what all cells share.
        cells: the cells, in the order in which they run.
        out: the folder of the race.
        timeout: seconds that a cell may take.
        show: called with lines that announce cells and failures.
        status: called with the state of the running cell, for a terminal.
        job: the command of a rank; the folder of its cell is added.
        on_change: called after every cell.

    Raises:
        RaceError: the folder holds another race.
        KeyboardInterrupt: the race was interrupted; its processes and its lab are gone.
    """
    check_race(out, race)
    failures: list[Failure] = []
    once = _Once(show)
    with _Runner(race.ranks, race.ranks_per_host, timeout) as runner:
        for number, cell in enumerate(cells, start=1):
            folder = CellFolder(out / CELLS / cell.name)
            where = f"{number} of {len(cells)}: {cell}"
            try:
                if folder.prepare(Spec(race, cell)):
                    show(f"{where}: finished before")
                    continue
                show(where)
                with _following(folder, where, once, status):
                    runner.run([*(job or JOB), str(folder.path)], cell.link)
                folder.read()  # a job that succeeds leaves a result
            except (OkTopkError, OSError) as error:
                failures.append(Failure(cell, _keep_error(folder, error)))
                show(f"{where}: failed: {failures[-1].problem}")
            on_change()
    return failures


def _keep_error(folder: CellFolder, error: Exception) -> str:
    """Keep the whole error in the cell's folder; returns one line of it."""
    with contextlib.suppress(OSError):  # a full disk must not end the race as well
        folder.fail(str(error))
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    ended_by_error = isinstance(error, JobFailed) and not isinstance(error, JobTimeout)
    return lines[-1].strip() if ended_by_error else lines[0]  # a traceback ends with its error


class _Runner:
    """Runs jobs on loopback, or in a lab that is built when the first cell needs it."""

    def __init__(self, ranks: int, ranks_per_host: int, timeout: float) -> None:
        self._ranks, self._ranks_per_host, self._timeout = ranks, ranks_per_host, timeout
        self._stack = contextlib.ExitStack()
        self._lab: Lab | None = None

    def run(self, command: Sequence[str], link: str) -> None:
        if not needs_lab(link):
            run_on_loopback(command, self._ranks, self._timeout)
            return
        if self._lab is None:
            hosts = self._ranks // self._ranks_per_host
            self._lab = self._stack.enter_context(Lab(hosts, ranks_per_host=self._ranks_per_host))
        self._lab.set_rate(link)
        self._lab.run(command, timeout=self._timeout)

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Once:
    """Shows every line only once."""

    def __init__(self, show: Show) -> None:
        self._show, self._shown = show, set[str]()

    def __call__(self, line: str) -> None:
        if line not in self._shown:
            self._shown.add(line)
            self._show(line)


@contextlib.contextmanager
def _following(folder: CellFolder, where: str, show: Show, status: Show | None) -> Iterator[None]:
    """Show what the cell says about itself, in a thread: the job's own output is kept for its errors."""
    end = threading.Event()

    def follow() -> None:
        while not end.wait(_LOOK_SECONDS):
            known = folder.progress() or {}
            if known.get("doing") == COMPILING:
                show(f"{COMPILING}: about 15 s, once per installation, before the clock starts")
            if status is not None:
                status(f"{where}: {describe(known)}")

    thread = threading.Thread(target=follow, name="oktopk race progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        if status is not None:
            status("")


def describe(known: dict[str, Any]) -> str:
    """Describe the progress of a cell.

    >>> describe({"doing": "training", "step": 50, "seconds": 12.34, "metrics": {"val loss": 2.5}})
    'step 50, clock 12.3 s, val loss 2.5'
    """
    if known.get("doing") != "training":
        return str(known.get("doing", "starting"))
    metrics = known.get("metrics") or {}
    name, value = next(iter(metrics.items()), (None, None))
    last = "" if value is None else f", {name} {value:.4g}"
    return f"step {known.get('step', 0):,}, clock {known.get('seconds', 0.0):.1f} s{last}"
