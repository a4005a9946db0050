"""density="auto" in a run: times of steps are gathered, and the model of all ranks says what comes next."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ...comm import Communicator
from ...errors import WireError
from ..settings import Settings
from .model import WINDOW, Budget, Costs, Course, Measured, decide, explain

_log = logging.getLogger(__name__)


class DensityBudget:
    """Follows a budget: the densities of all sparse steps after warm-up and ramp, the same on all ranks.

    `density()` is a pure function; `record()` and `decide()` change what it answers.
    """

    def __init__(self, settings: Settings, start: int) -> None:
        self.budget = Budget(settings.budget, settings.min_density)
        self.course = Course.first(start, self.budget)
        self._timed: list[tuple[float, float, float]] = []
        """Density, exposed time and period of the steps of this window, on this rank."""
        self._ended: float | None = None

    def density(self, step: int) -> float:
        """The density of a sparse step of this window."""
        return self.course.density_at(step, self.budget)

    def record(self, step: int, density: float | None, exposed: float, ended: float) -> None:
        """Record a step; one that was dense or skipped has no density, and tells nothing.

        Args:
            step: its number.
            density: what it was reduced with.
            exposed: seconds from its last bucket to its end.
            ended: when it ended, by time.perf_counter().
        """
        before, self._ended = self._ended, ended
        if density is not None and before is not None and step >= self.course.start and self.course.counts(step):
            self._timed.append((density, max(0.0, exposed), max(0.0, ended - before)))

    def decides_after(self, step: int) -> bool:
        """Whether the step is the last one of a window."""
        return step >= self.course.start + WINDOW - 1

    def decide(self, comm: Communicator, step: int) -> None:
        """Agree with all ranks of `comm` on the next window, which begins behind this step."""
        timed, self._timed = self._timed, []
        chosen = None
        if timed:  # on all ranks alike
            own = torch.tensor([times[1:] for times in timed], dtype=torch.float64)
            gathered = gather_seconds(comm, own.flatten(), "density").view(comm.world, *own.shape)
            exposed, period = gathered[:, :, 0].amin(0).tolist(), gathered[:, :, 1].median(0).values.tolist()
            agreed = [Measured(*of_step) for of_step in zip((t[0] for t in timed), exposed, period, strict=True)]
            chosen = decide(self.course, agreed, self.budget)
        before, self.course = self.course, replace(chosen or self.course, start=step + 1)
        first = before.costs.base == 0
        if comm.rank == 0 and chosen is not None and (first or chosen.density != before.density):
            _log.info(
                "oktopk: density %.3g %% from step %d on: %s",
                *(100 * self.course.density, self.course.start, explain(self.course, self.budget)),
            )

    def figures(self) -> dict[str, float]:
        """The model and the budget, for loggers."""
        course = self.course
        return {
            "chosen_density": course.density,
            "density_seconds": course.costs.dependent(course.density),
            "fixed_seconds": course.costs.fixed,
            "budget_seconds": self.budget.share * course.costs.base,
        }

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.course)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a course; a ValueError if that cannot be right."""
        course = read_course(saved)
        self.course = replace(course, density=self.budget.limit(course.density))
        self._timed, self._ended = [], None


def read_course(saved: Mapping[str, Any]) -> Course:
    """Check a course that another rank or a file has told."""
    costs = Costs(**saved["costs"])
    course = Course(**{**saved, "costs": costs})
    seconds = (costs.fixed, costs.slope, costs.base)
    if not all(type(x) in (int, float) and math.isfinite(x) for x in seconds) or min(seconds[1:]) < 0:
        raise ValueError(f"density budget: costs must be finite, and only fixed ones may be negative, got {costs}")
    if type(course.density) is not float or not 0 < course.density <= 1:
        raise ValueError(f"density budget: density must be in (0, 1], got {course.density!r}")
    counts = (course.start, course.rest, course.pause)
    if type(course.probing) is not bool or not all(type(x) is int and x >= 0 for x in counts):
        raise ValueError(f"density budget: start, rest and pause must be integers from 0, got {course}")
    return course


def gather_seconds(comm: Communicator, own: Tensor, what: str) -> Tensor:
    """The times of all ranks, a row for each; a rank that sends something else is named."""
    gathered = comm.all_gather_sealed(own, own.nbytes, what)
    for rank, seconds in enumerate(gathered):
        if seconds.numel() != own.numel() or not bool((seconds >= 0).all() and seconds.isfinite().all()):
            who = comm.global_rank(rank)
            raise WireError(f"all_gather ({what}): rank {who} sent {seconds.tolist()} as seconds")
    return torch.stack(gathered)
