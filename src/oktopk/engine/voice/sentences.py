"""The sentences: pure functions of what is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...algorithms import Dense
from ...algorithms.volume import WORD_BYTES
from ...metrics.events import ENTRY_BYTES
from ..autotune import RAMP_FROM, TRIAL, Autotune, Schedule
from ..settings import MOST_DENSITY, Settings


@dataclass(frozen=True)
class Decision:
    """What all ranks have decided at the end of a trial.

    Attributes:
        step: the first step that it holds for.
        dense: whether steps are dense from there on.
        changed: whether they were not before; the first decision always changes something.
        dense_seconds: what a dense step takes, from its first bucket to its end; the mean over ranks.
        sparse_seconds: what a sparse step takes.
        dense_bytes: what this rank sent in its last dense step; 0 if there was none.
        sparse_bytes: what it sent in its last sparse step.
        next_test: the first step of the next trial.
    """

    step: int
    dense: bool
    changed: bool
    dense_seconds: float
    sparse_seconds: float
    dense_bytes: int
    sparse_bytes: int
    next_test: int

    def sentence(self) -> str:
        """The decision in one line, alike in both directions."""
        still = "" if self.changed else "still "
        way, forced = ("dense", "; auto=False forces sparse steps") if self.dense else ("sparse", "")
        later = f"; next test at step {self.next_test}{forced}"
        return f"oktopk: {still}{way} from step {self.step} on: {self.reason()}{later}"

    def facts(self) -> dict[str, Any]:
        """The line of a metrics file, which has the step of its own."""
        return {name: value for name, value in asdict(self).items() if name != "step"}

    def reason(self) -> str:
        """What was measured, the way that was chosen first."""
        seconds = [show_ms(self.sparse_seconds), show_ms(self.dense_seconds)]
        sent = [show_bytes(self.sparse_bytes), show_bytes(self.dense_bytes)]
        if self.dense:
            seconds.reverse()
            sent.reverse()
        text = f"{seconds[0]} instead of {seconds[1]} per step (from its first bucket on)"
        if not (self.sparse_bytes and self.dense_bytes):
            return text
        return f"{text}, {'though ' if self.dense else ''}{sent[0]} instead of {sent[1]} per rank"


def plan_sentence(settings: Settings, parameters: int, world: int) -> str:
    """What is going to happen, in one line.

    >>> from oktopk import ALGORITHMS
    >>> for part in plan_sentence(Settings(ALGORITHMS["oktopk"](), warmup_steps=20), 25_000_000, 4).split("; "):
    ...     print(part)
    oktopk: steps 0 to 19 dense (warm-up), then sparse
    a sparse step sends 1 % of 25,000,000 entries: 2 MB of indices and values instead of 100 MB
    4 ranks
    >>> ramp = Settings(ALGORITHMS["oktopk"](), warmup_steps=5, ramp_steps=40, auto=True)
    >>> print(plan_sentence(ramp, 25_000_000, 4).split("; ")[0])
    oktopk: steps 0 to 4 dense (warm-up), steps 5 to 44 sparse (ramp), steps 45 to 52 on trial, then the faster way
    """
    if isinstance(settings.algorithm, Dense):
        return (
            f"oktopk: all steps dense (algorithm='dense'): {_dense_bytes(parameters)} of gradient; {_ranks(world)}"
        )
    schedule, autotune = Schedule.of(settings), Autotune(settings)
    warmup = schedule.warmup_steps
    steps = f"{_range(0, warmup)} dense (warm-up), " if warmup else ""
    if isinstance(settings.density, tuple):
        steps += f"then the given schedule of {len(settings.density)} densities"
    elif autotune.tests:
        first = autotune.next_test(0)
        ramp = range(warmup, warmup + schedule.ramp_steps) if settings.fusion_density < RAMP_FROM else ()
        steps += f"{_range(ramp[0], ramp[-1] + 1)} sparse (ramp), " if ramp else ""
        steps += f"{_range(first, first + TRIAL)} {'' if ramp else 'sparse '}on trial, then the faster way"
    else:
        steps += "then sparse" if warmup else "all steps sparse"
    return f"oktopk: {steps}; {_volume(settings, schedule, parameters)}; {_ranks(world)}"


def _range(start: int, stop: int) -> str:
    return f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"


def _ranks(world: int) -> str:
    return f"{world} ranks" if world > 1 else "1 rank, so nothing is exchanged"


def _dense_bytes(parameters: int) -> str:
    return show_bytes(WORD_BYTES * parameters)


def _volume(settings: Settings, schedule: Schedule, parameters: int) -> str:
    least = settings.fusion_density
    share = f"{100 * least:.3g} %"
    if isinstance(settings.density, str):
        share = f"{100 * least:.3g} % to {100 * MOST_DENSITY:.3g} % (by measurement)"
    elif isinstance(settings.density, tuple):
        share = f"at least {share}"
    elif schedule.ramp_steps and least < RAMP_FROM:
        share += f" (at first {100 * RAMP_FROM:.3g} %, falling over {schedule.ramp_steps} steps)"
    payload = show_bytes(ENTRY_BYTES * max(1, round(least * parameters)))
    return (
        f"a sparse step sends {share} of {parameters:,} entries: {payload} of indices and values instead of "
        f"{_dense_bytes(parameters)}"
    )


def ending_sentence(dense: int, tried: int, to_go: int, warmup: int, measured: str | None) -> str:
    """Why a run never went sparse.

    Args:
        dense: its dense steps.
        tried: its sparse steps, all of the ramp or of trials.
        to_go: steps that the warm-up still had to go.
        warmup: its length.
        measured: what the last comparison found, if there was one.

    >>> ending_sentence(60, 0, 68, 128, None)
    'oktopk: all 60 steps were dense: the warm-up takes 128. For so few, pass total_steps=60 alone'
    """
    if measured is not None:
        return f"oktopk: {dense} of {dense + tried} steps were dense, because that was faster: {measured}"
    if tried:
        return (
            f"oktopk: {dense} steps were dense; the run ended after {tried} sparse ones, before both were compared"
        )
    if to_go >= 0:
        return (
            f"oktopk: all {dense} steps were dense: the warm-up takes {warmup}. For so few, pass "
            f"total_steps={dense} alone"
        )
    return f"oktopk: all {dense} steps were dense: the trial of sparse ones had not begun"


def show_bytes(count: float) -> str:
    """
    >>> show_bytes(153_400_000), show_bytes(91_200), show_bytes(12)
    ('153 MB', '91.2 kB', '12 bytes')
    """
    if count < 1000:
        return f"{count:.0f} bytes"
    return f"{count / 1e6:.3g} MB" if count >= 999_500 else f"{count / 1e3:.3g} kB"


def show_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
