"""Dense or sparse: decided once per step, by the warm-up rule and, with `auto`, by measured step times.

Whole steps are compared, because a dense sum may be hidden behind backward where a faster sparse exchange is not.

    warm-up, ramp │ 8 sparse steps │ the faster way … │ 4 of the other way │ the faster way … │ 4 of the other …
                  └ trial ─────────┘                  └ re-test at 256 ────┘                  └ at 512, 1024, …
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..algorithms import Dense
from ..comm import Communicator
from ..errors import WireError
from .settings import Settings

_log = logging.getLogger(__name__)

RAMP_FROM = 0.25
"""The density at which a ramp begins."""
TRIAL = 8
"""Sparse steps before the first decision; the first ones compile kernels and evaluate thresholds exactly."""
RETRIAL = 4
FIRST_RETEST = 256
GAIN = 0.97
"""Sparse steps must be at least this much faster, or training stays dense: a tie is not worth a residual."""
_TIMED_DENSE_STEPS = 4
"""A shorter warm-up is followed by dense steps until so many have been timed."""


@dataclass(frozen=True)
class Schedule:
    """The warm-up rule: steps 0 … warmup_steps - 1 are dense. Then, if asked for, the density falls by the same
    factor on each of `ramp_steps` steps, from 25 % to the final one.

    >>> Schedule(0.01, warmup_steps=2).density_at(1) is None
    True
    >>> [round(Schedule(0.01, 2, ramp_steps=2).density_at(step), 3) for step in (2, 3, 4)]
    [0.25, 0.05, 0.01]
    """

    density: float
    warmup_steps: int = 128
    ramp_steps: int = 0

    def density_at(self, step: int) -> float | None:
        """The density of a sparse step; None for a dense one."""
        done = step - self.warmup_steps
        if done < 0:
            return None
        if done >= self.ramp_steps or self.density >= RAMP_FROM:
            return self.density
        return RAMP_FROM * math.pow(self.density / RAMP_FROM, done / self.ramp_steps)

    def final_steps(self, step: int) -> int:
        """How many steps at the final density come before this one; negative during warm-up and ramp."""
        return step - self.warmup_steps - self.ramp_steps

    def dense_steps(self, total: int) -> int:
        """How many of the first `total` steps are dense warm-up."""
        return min(total, self.warmup_steps)


class Autotune:
    """Chooses the density of every step, the same on all ranks: by the number of the step, and by decisions that
    all ranks take together. `density()` is a pure function; `record()` and `decide()` change what it answers.
    """

    def __init__(self, settings: Settings) -> None:
        self._schedule = Schedule(settings.density, settings.warmup_steps, settings.ramp_steps)
        self._compresses = not isinstance(settings.algorithm, Dense)
        self._auto = settings.auto
        self._first_trial = max(0, _TIMED_DENSE_STEPS - settings.warmup_steps)
        self._times: dict[bool, deque[float]] = {True: deque(maxlen=16), False: deque(maxlen=5)}
        """Seconds of the last dense (True) and sparse (False) steps."""
        self._said_dense = False
        self.prefers_dense = False
        self.agreed = (0.0, 0.0)
        """(dense, sparse) seconds, the means over ranks, that the last decision was based on."""

    def density(self, step: int) -> float | None:
        """The density of a step; None if it is dense."""
        density = self._schedule.density_at(step) if self._compresses else None
        final = self._schedule.final_steps(step)
        if density is None or not self._auto or final < 0:
            return density
        into, length = self._trial(final)
        if length == TRIAL:
            goes_dense = into < 0
        else:
            goes_dense = self.prefers_dense if into < 0 else not self.prefers_dense
        return None if goes_dense else density

    def _trial(self, final: int) -> tuple[int, int]:
        """(steps into the trial that is under way or comes next, its length); negative before it."""
        if final < self._first_trial + TRIAL:
            return final - self._first_trial, TRIAL
        start = FIRST_RETEST
        while final >= start + RETRIAL:
            start *= 2
        return final - start, RETRIAL

    def record(self, step: int, dense: bool, seconds: float) -> None:
        """Record how long a step took, from its first bucket to its end."""
        if not self._auto:
            return
        if self._trial(self._schedule.final_steps(step))[0] == 0:
            self._times[dense].clear()  # a trial forgets the old times of the way that it tries
        self._times[dense].append(seconds)

    def decides_after(self, step: int) -> bool:
        """Whether the step is the last one of a trial."""
        if not (self._auto and self._compresses):
            return False
        into, length = self._trial(self._schedule.final_steps(step))
        return into == length - 1

    def decide(self, comm: Communicator) -> None:
        """Compare what all ranks of `comm` have measured; all of them come to the same decision."""
        own = torch.tensor(self.typical(), dtype=torch.float64)
        gathered = comm.all_gather_sealed(own, own.nbytes, "dense or sparse")
        for rank, seconds in enumerate(gathered):
            if seconds.numel() != own.numel() or not bool((seconds >= 0).all() and seconds.isfinite().all()):
                who = comm.global_rank(rank)
                raise WireError(f"all_gather (dense or sparse): rank {who} sent {seconds.tolist()} as seconds")
        means = torch.stack(gathered).mean(0)
        dense, sparse = self.agreed = float(means[0]), float(means[1])
        self.prefers_dense = dense > 0 and sparse > GAIN * dense
        if comm.rank == 0:
            self._log_decision(1e3 * dense, 1e3 * sparse)

    def typical(self) -> tuple[float, float]:
        """(dense, sparse) seconds: the lower quartile and the median, so that training stays dense in doubt.

        Disturbances only make a step longer; a few dense ones may all have been disturbed.
        """
        dense, sparse = self.agreed  # all there is of a way that was not taken since the run was resumed
        known = sorted(self._times[True]) or [dense]
        return known[(len(known) - 1) // 4], median(self._times[False] or [sparse])

    def _log_decision(self, dense: float, sparse: float) -> None:
        if not self.prefers_dense:
            _log.info("oktopk: sparse steps from here on: %.3g ms instead of %.3g ms dense", sparse, dense)
            return
        level = logging.INFO if self._said_dense else logging.WARNING
        self._said_dense = True
        _log.log(
            level, "oktopk: training stays dense, which is faster here: %.3g ms per step, sparse takes %.3g ms. "
            "auto=False forces sparse steps", dense, sparse,
        )  # fmt: skip

    def decision(self) -> dict[str, Any]:
        """What was decided last, the same on all ranks."""
        return {"prefers_dense": self.prefers_dense, "seconds": list(self.agreed)}

    def state_dict(self) -> dict[str, Any]:
        return {**self.decision(), "seconds": list(self.typical() if self._auto else self.agreed)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what was decided; a ValueError if that cannot be right."""
        self.prefers_dense, self.agreed = read_decision(saved)


def read_decision(saved: Mapping[str, Any]) -> tuple[bool, tuple[float, float]]:
    """Check a decision that another rank or a file has told: (prefers_dense, seconds)."""
    dense, sparse = saved["seconds"]
    if not all(type(x) in (int, float) and 0 <= x <= sys.float_info.max for x in (dense, sparse)):
        raise ValueError(f"autotune: step times must be finite and not negative, got {saved['seconds']}")
    if type(saved["prefers_dense"]) is not bool:
        raise ValueError(f"autotune: prefers_dense must be a bool, got {saved['prefers_dense']!r}")
    return saved["prefers_dense"], (float(dense), float(sparse))
