"""Compose time to quality from two measurements: quality by step on loopback, and step times by link.

Quality as a function of steps does not depend on the link, and step times do not depend on the seed. So a cell
that was trained on loopback gets, for every step, the mean time of a step of the same phase on the link:

    clock after step s  =  Σ over steps 1 … s  of  mean seconds of the step's phase on the link
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from .cells import Point, Step
from .spec import RaceError

UNSTEADY = 2
"""First steps of each phase that a timing cell does not count: DDP rebuilds its buckets, and thresholds are
evaluated exactly."""


@dataclass(frozen=True)
class PhaseMean:
    """The mean step of a phase."""

    steps: int
    seconds: float
    sent_bytes: float


def phase_means(steps: Sequence[Step], unsteady: int = 0) -> dict[str, PhaseMean]:
    """The mean step of each phase, in the order of phases, without the first `unsteady` steps of each."""
    of_phase: dict[str, list[Step]] = {}
    for step in steps:
        of_phase.setdefault(step.phase, []).append(step)
    return {phase: _mean(found[unsteady:] or found) for phase, found in of_phase.items()}


def _mean(steps: Sequence[Step]) -> PhaseMean:
    count = len(steps)
    return PhaseMean(count, sum(s.seconds for s in steps) / count, sum(s.sent_bytes for s in steps) / count)


def compose(
    steps: Sequence[Step], curve: Sequence[Point], means: Mapping[str, PhaseMean]
) -> tuple[list[Step], list[Point]]:
    """Give steps and curve the times and bytes that they would have had on another link.

    Args:
        steps: the steps of a cell trained anywhere.
        curve: its validations.
        means: the mean step of each phase on the link.
    """
    missing = {step.phase for step in steps} - set(means)
    if missing:
        raise RaceError(f"no step times of the {', '.join(sorted(missing))} phase: raise --timing-steps")
    moved = [
        replace(step, seconds=means[step.phase].seconds, sent_bytes=means[step.phase].sent_bytes) for step in steps
    ]
    clock = [0.0, *accumulate(step.seconds for step in moved)]
    sent = [0.0, *accumulate(step.sent_bytes for step in moved)]
    return moved, [replace(point, seconds=clock[point.step], sent_bytes=sent[point.step]) for point in curve]
