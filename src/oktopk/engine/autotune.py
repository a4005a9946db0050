"""Dense or sparse: decided once per step, by the warm-up rule and, with `auto`, by measured step times.

With density="auto" the density of sparse steps follows a budget (`density/`), and the first trial comes later.
Whole steps are compared, because a dense sum may be hidden behind backward where a faster sparse exchange is not.

    warm-up, ramp │ 8 sparse steps │ the faster way … │ 4 of the other way │ the faster way … │ 4 of the other …
                  └ trial ─────────┘                  └ re-test at 256 ────┘                  └ at 512, 1024, …

The first re-test comes later where one way is far slower: trying it must cost little.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..algorithms import Dense
from ..comm import Communicator
from .density.budget import DensityBudget, gather_seconds, read_course
from .density.model import WINDOW
from .settings import AUTO, WARMUP_VALUES, Pairs, Settings

RAMP_FROM = 0.25
"""The density at which a ramp begins."""
WARMUP_SHARE, LONGEST_WARMUP = 0.01, 128
RAMP_SHARE, LONGEST_RAMP = 0.08, 512
"""Shares of a run, and most steps, that are dense and that ramp if `warmup_steps` is None."""
SHORT_RUN = 500
"""The length of a run, if nobody knows it."""
TRIAL = 8
"""Sparse steps before the first decision; the first ones compile kernels and evaluate thresholds exactly."""
RETRIAL = 4
FIRST_RETEST = 256
LATEST_RETEST = 2**16
RETEST_COST = 0.01
"""The first re-test comes so late that the slower way costs no more than this share of the time until then."""
GAIN = 0.97
"""Sparse steps must be at least this much faster, or training stays dense: a tie is not worth a residual."""
_TIMED_DENSE_STEPS = 4
"""A shorter warm-up is followed by dense steps until so many have been timed; those in 16 bits do not count."""
_SETTLING = 2 * WINDOW
"""Sparse steps before the first trial, if the density is chosen by measurement."""


def plan_warmup(total_steps: int) -> tuple[int, int]:
    """The rule behind `warmup_steps=None`: (dense steps, ramp steps) of a run of so many.

    >>> plan_warmup(500), plan_warmup(10_000), plan_warmup(100_000)
    ((5, 40), (100, 512), (128, 512))
    """
    dense, ramp = math.ceil(WARMUP_SHARE * total_steps), math.ceil(RAMP_SHARE * total_steps)
    return min(LONGEST_WARMUP, dense), min(LONGEST_RAMP, ramp)


@dataclass(frozen=True)
class Schedule:
    """The warm-up rule: steps 0 … warmup_steps - 1 are dense. Then, if asked for, the density falls by the same
    factor on each of `ramp_steps` steps, from 25 % to the final one. Pairs give the density from each step on
    instead, and have no ramp.

    >>> Schedule(0.01, warmup_steps=2).density_at(1) is None
    True
    >>> [round(Schedule(0.01, 2, ramp_steps=2).density_at(step), 3) for step in (2, 3, 4)]
    [0.25, 0.05, 0.01]
    >>> [Schedule(((0, None), (3, 0.04), (5, 0.01)), 1).density_at(step) for step in (0, 1, 3, 4, 5)]
    [None, None, 0.04, 0.04, 0.01]
    """

    density: float | Pairs
    warmup_steps: int = 128
    ramp_steps: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Schedule:
        """The rule that settings ask for; a density that is chosen by measurement begins at its least."""
        density = settings.min_density if isinstance(settings.density, str) else settings.density
        if settings.warmup_steps is not None:
            return cls(density, settings.warmup_steps, settings.ramp_steps or 0)
        warmup_steps, ramp_steps = plan_warmup(settings.total_steps or SHORT_RUN)
        return cls(density, warmup_steps, ramp_steps if settings.ramp_steps is None else settings.ramp_steps)

    def density_at(self, step: int) -> float | None:
        """The density of a sparse step; None for a dense one."""
        done = step - self.warmup_steps
        if done < 0:
            return None
        if isinstance(self.density, tuple):
            last = bisect_right(self.density, step, key=lambda pair: pair[0]) - 1
            return self.density[max(0, last)][1]
        if done >= self.ramp_steps or self.density >= RAMP_FROM:
            return self.density
        return RAMP_FROM * math.pow(self.density / RAMP_FROM, done / self.ramp_steps)

    def final_steps(self, step: int) -> int:
        """How many steps at the final density come before this one; negative during warm-up and ramp."""
        return step - self.warmup_steps - self.ramp_steps

    def sparse_steps(self, total: int) -> Sequence[int]:
        """Which of the first `total` steps are sparse."""
        after = range(min(total, self.warmup_steps), total)
        if isinstance(self.density, tuple):
            return [step for step in after if self.density_at(step) is not None]
        return after


class Autotune:
    """Chooses the density of every step, the same on all ranks: by the number of the step, and by decisions that
    all ranks take together. `density()` is a pure function; `record()` and `decide()` change what it answers.
    """

    def __init__(self, settings: Settings) -> None:
        self._schedule = schedule = Schedule.of(settings)
        self._compresses = not isinstance(settings.algorithm, Dense)
        self._auto = settings.auto and not isinstance(settings.density, tuple)
        self._narrows = settings.warmup_values != WARMUP_VALUES[0]
        """Whether dense steps of the warm-up are shorter than others."""
        self._first_trial = max(0, _TIMED_DENSE_STEPS - (0 if self._narrows else schedule.warmup_steps))
        self.budget: DensityBudget | None = None
        if settings.density == AUTO and self._compresses:
            self.budget = DensityBudget(settings, schedule.warmup_steps + schedule.ramp_steps)
        self._times: dict[bool, deque[float]] = {True: deque(maxlen=16), False: deque(maxlen=5)}
        """Seconds of the last dense (True) and sparse (False) steps."""
        self.prefers_dense = False
        self.agreed = (0.0, 0.0)
        """(dense, sparse) seconds, the means over ranks, that the last decision was based on."""
        self._retest = FIRST_RETEST

    def density(self, step: int) -> float | None:
        """The density of a step; None if it is dense."""
        density = self._schedule.density_at(step) if self._compresses else None
        if density is not None and self.budget is not None and self._schedule.final_steps(step) >= 0:
            density = self.budget.density(step)
        final = self._settled_steps(step)
        if density is None or not self._auto or final < 0:
            return density
        into, length = self._trial(final)
        if length == TRIAL:
            goes_dense = into < 0
        else:
            goes_dense = self.prefers_dense if into < 0 else not self.prefers_dense
        return None if goes_dense else density

    def warms_up(self, step: int) -> bool:
        """Whether a step is dense because it is one of the first."""
        return self._compresses and step < self._schedule.warmup_steps

    def _settled_steps(self, step: int) -> int:
        """How many steps come before this one that trials may compare; negative before the first of them."""
        return self._schedule.final_steps(step) - (0 if self.budget is None else _SETTLING)

    def _trial(self, final: int) -> tuple[int, int]:
        """(steps into the trial that is under way or comes next, its length); negative before it."""
        if final < self._first_trial + TRIAL:
            return final - self._first_trial, TRIAL
        start = self._retest
        while final >= start + RETRIAL:
            start *= 2
        return final - start, RETRIAL

    def record(self, step: int, dense: bool, seconds: float) -> None:
        """Record how long a step took, from its first bucket to its end."""
        if not self._auto or (self._narrows and self.warms_up(step)):
            return
        if self._trial(self._settled_steps(step))[0] == 0:
            self._times[dense].clear()  # a trial forgets the old times of the way that it tries
        self._times[dense].append(seconds)

    def end_step(
        self, step: int, density: float | None, counts: bool, start: float, handed_over: float,
        deciding: Communicator | None,
    ) -> bool:  # fmt: skip
        """Record the times of a step; whether it was the last one of a trial.

        Args:
            step: its number.
            density: of the step; None if it was dense.
            counts: whether its times tell something.
            start: when its first bucket was handed in, by time.perf_counter().
            handed_over: when the last one was.
            deciding: the ranks that decide together at the end of a trial; None if this is none of them.
        """
        now, decides = time.perf_counter(), self.decides_after(step)
        if counts:
            self.record(step, density is None, now - start)
        if self.budget is not None:
            self.budget.record(step, density if counts else None, now - handed_over, now)
        if deciding is not None and decides:
            self.decide(deciding, step)
        if deciding is not None and self.budget is not None and self.budget.decides_after(step):
            self.budget.decide(deciding, step)
        return decides

    @property
    def tests(self) -> bool:
        """Whether both ways are compared."""
        return self._auto and self._compresses

    def next_test(self, step: int) -> int:
        """The first step of the trial that is under way at this step, or of the next one."""
        return step - self._trial(self._settled_steps(step))[0]

    def is_trial(self, step: int) -> bool:
        """Whether the step belongs to a trial."""
        return self.tests and self._trial(self._settled_steps(step))[0] >= 0

    def has_decided(self, step: int) -> bool:
        """Whether a trial has ended before this step."""
        return self.tests and self._trial(self._settled_steps(step))[1] != TRIAL

    def decides_after(self, step: int) -> bool:
        """Whether the step is the last one of a trial."""
        into, length = self._trial(self._settled_steps(step))
        return self.tests and into == length - 1

    def decide(self, comm: Communicator, step: int) -> None:
        """Compare what all ranks of `comm` have measured up to this step; all come to the same decision."""
        own = torch.tensor(self.typical(), dtype=torch.float64)
        means = gather_seconds(comm, own, "dense or sparse").mean(0)
        dense, sparse = self.agreed = float(means[0]), float(means[1])
        self.prefers_dense = dense > 0 and sparse > GAIN * dense
        if not self.has_decided(step):  # later re-tests follow at doubling distance, whatever they find
            self._retest = first_retest(dense, sparse)

    def typical(self) -> tuple[float, float]:
        """(dense, sparse) seconds: the lower quartile and the median, so that training stays dense in doubt.

        Disturbances only make a step longer; a few dense ones may all have been disturbed.
        """
        dense, sparse = self.agreed  # all there is of a way that was not taken since the run was resumed
        known = sorted(self._times[True]) or [dense]
        return known[(len(known) - 1) // 4], median(self._times[False] or [sparse])

    def decision(self) -> dict[str, Any]:
        """What was decided last, the same on all ranks."""
        density = {} if self.budget is None else {"density": self.budget.state_dict()}
        chosen = {"prefers_dense": self.prefers_dense, "retest": self._retest}
        return {**chosen, "seconds": list(self.agreed), **density}

    def state_dict(self) -> dict[str, Any]:
        return {**self.decision(), "seconds": list(self.typical() if self._auto else self.agreed)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what was decided; a ValueError if that cannot be right."""
        self.prefers_dense, self._retest, self.agreed = read_decision(saved)
        if self.budget is not None and "density" in saved:
            self.budget.load_state_dict(saved["density"])


def first_retest(dense: float, sparse: float) -> int:
    """Steps before the first re-test, by the seconds of both ways: a way that is far slower is tried again late.

    >>> first_retest(1.0, 0.9), first_retest(1.2, 0.2), first_retest(0.0, 1.0)
    (256, 2048, 256)
    """
    fast, slow = sorted((dense, sparse))
    start = FIRST_RETEST
    while start < LATEST_RETEST and fast > 0 and RETRIAL * (slow / fast - 1) > RETEST_COST * start:
        start *= 2
    return start


def read_decision(saved: Mapping[str, Any]) -> tuple[bool, int, tuple[float, float]]:
    """Check a decision that another rank or a file has told: (prefers_dense, first re-test, seconds)."""
    if "density" in saved:
        read_course(saved["density"])
    dense, sparse = saved["seconds"]
    if not all(type(x) in (int, float) and 0 <= x <= sys.float_info.max for x in (dense, sparse)):
        raise ValueError(f"autotune: step times must be finite and not negative, got {saved['seconds']}")
    if type(saved["prefers_dense"]) is not bool:
        raise ValueError(f"autotune: prefers_dense must be a bool, got {saved['prefers_dense']!r}")
    retest = saved.get("retest", FIRST_RETEST)
    if type(retest) is not int or not FIRST_RETEST <= retest <= LATEST_RETEST:
        raise ValueError(
            f"autotune: the first re-test must be in [{FIRST_RETEST}, {LATEST_RETEST}], got {retest!r}"
        )
    return saved["prefers_dense"], retest, (float(dense), float(sparse))
