"""Dense when dense is faster: each bucket keeps the way that the clock prefers, the same on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

import torch

from ..comm import Communicator

TRIAL = 8
"""Sparse steps before the first decision; the first ones compile kernels and evaluate thresholds exactly."""
RETRIAL = 4
FIRST_RETEST = 256
GAIN = 0.97
"""Sparse must be at least that much faster, or the bucket goes dense: a tie is not worth a residual."""


@dataclass(frozen=True)
class Calendar:
    """When the ways are tried, in steps of the sparse phase: a first trial, and re-tests at doubling distance.

    `missing` dense steps come first when the warm-up was too short to time them.
    """

    missing: int = 0

    def window(self, done: int) -> tuple[int, int]:
        """(steps into the trial that is under way or comes next, its length); negative before it."""
        return _window(self.missing, done, FIRST_RETEST)

    def decides(self, done: int) -> bool:
        """Whether the step is the last one of a trial."""
        into, length = self.window(done)
        return into == length - 1


@lru_cache(maxsize=8)  # every bucket of a step asks for the same one
def _window(first: int, done: int, start: int) -> tuple[int, int]:
    if done < first + TRIAL:
        return done - first, TRIAL
    while done >= start + RETRIAL:
        start *= 2
    return done - start, RETRIAL


@dataclass
class Choice:
    """What is known of one bucket."""

    dense: bool = False
    times: dict[bool, deque[float]] = field(
        default_factory=lambda: {True: deque(maxlen=16), False: deque(maxlen=5)}
    )
    """Seconds of the last dense (True) and sparse (False) reductions."""
    agreed: tuple[float, float] = (0.0, 0.0)
    """(dense, sparse) seconds, the mean over ranks, that the last decision was made with."""

    def goes_dense(self, done: int, calendar: Calendar) -> bool:
        """The way of this step: the one under trial, or the better one."""
        into, length = calendar.window(done)
        if length == TRIAL:
            return into < 0
        return self.dense if into < 0 else not self.dense

    def note(self, dense: bool, seconds: float) -> None:
        self.times[dense].append(seconds)

    def typical(self) -> tuple[float, float]:
        """(dense, sparse) seconds: the lower quartile and the median, so that in doubt a bucket goes dense.

        Whatever disturbs a reduction makes it longer; a few dense ones may all have been disturbed.
        """
        dense, sparse = self.agreed  # all there is of a way that was not gone since the run was resumed
        known = sorted(self.times[True]) or [dense]
        return known[(len(known) - 1) // 4], median(self.times[False] or [sparse])

    def start_trial(self, dense: bool) -> None:
        """Forget old figures of the way that is tried anew."""
        self.times[dense].clear()


def decide(comm: Communicator, choices: Sequence[Choice]) -> None:
    """All ranks share what they measured, and take the same decision for every bucket."""
    own = torch.tensor([choice.typical() for choice in choices], dtype=torch.float64).flatten()
    means = torch.stack(comm.all_gather_sealed(own, own.nbytes, "dense or sparse")).mean(0)
    for choice, (dense, sparse) in zip(choices, means.view(-1, 2).tolist(), strict=True):
        choice.agreed = dense, sparse
        choice.dense = dense > 0 and sparse > GAIN * dense
