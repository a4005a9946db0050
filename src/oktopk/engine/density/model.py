"""density="auto": the largest density whose exposed communication stays within a budget, by measured steps.

The model of a sparse step with density d:

    exposed(d) = fixed + slope · d      fixed    whatever d is: latency, control messages, the pass that selects
                                        slope·d  what d costs: encoding, transfer, decoding, sums
    period(d)  = base + slope · d       from the end of a step to the end of the next one

Of each step the smallest exposed time over all ranks counts: the rank that came last has waited for nobody,
whatever the algorithm. The slope comes from steps of two densities; what does not depend on the density cancels
out. If `fixed` is negative, backward hides so much: only slope · d + fixed is exposed. The budget allows

    slope · d + min(0, fixed)  <=  budget · base

    probing window   │ 8 steps at d / 4 │ 8 steps at d │   two medians: slope and fixed
    resting window   │ 16 steps at d                   │   one median: is it what slope and fixed predict?

All ranks gather their times at the end of each window, in one small round, and decide alike. A new density outside
of what was measured is probed next; otherwise 4 windows rest, then 8, 16, … up to 64. Exposed time that is not as
predicted (another link) ends the rest: a longer one is taken for a larger slope at once, a shorter one is probed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from ..settings import LEAST_DENSITY, MOST_DENSITY

WINDOW = 16
"""Steps between decisions."""
_HALF = WINDOW // 2
SPREAD = 4.0
"""The upper density of a probe is so many times the lower one. A density grows by no more at a time."""
TOLERANCE = 1.25
"""A density within this factor of the wanted one stays: medians of a few steps are no better."""
_SAME_LINK = 2.0
"""A slope that is measured again after a rest is averaged with the one before, if it is within this factor."""
_REST, _LONGEST_REST = 4, 64
_FEWEST = 3
"""Steps that a median needs."""


class Measured(NamedTuple):
    """A sparse step, as all ranks have agreed on it.

    Attributes:
        density: of the step.
        exposed: seconds from the last bucket to the end of the step, the smallest over ranks.
        period: seconds from the end of the step before to the end of this one, the median over ranks.
    """

    density: float
    exposed: float
    period: float


@dataclass(frozen=True)
class Budget:
    """What is allowed: a share of a step without its density-dependent part, and the range of densities."""

    share: float
    least: float
    most: float = MOST_DENSITY

    def limit(self, density: float) -> float:
        return min(self.most, max(self.least, density))


@dataclass(frozen=True)
class Costs:
    """The model of a step, in seconds; the slope is per unit of density."""

    fixed: float = 0.0
    slope: float = 0.0
    base: float = 0.0

    def exposed(self, density: float) -> float:
        return max(0.0, self.fixed + self.slope * density)

    def dependent(self, density: float) -> float:
        """The part of the exposed time that depends on the density."""
        return max(0.0, self.slope * density + min(0.0, self.fixed))

    def exceed(self, budget: Budget) -> bool:
        """Whether fixed costs alone are more than the budget."""
        return self.fixed > budget.share * self.base


@dataclass(frozen=True)
class Course:
    """What all ranks do in the window that begins with step `start`.

    Attributes:
        start: the first step of the window.
        density: of a resting window, and the upper one of a probe.
        probing: whether the window has two densities.
        costs: the model, as far as it is known.
        rest: windows until the next probe; 0 in a probe that was due, and for which there was no other reason.
        pause: windows between the last two probes, which doubles when a probe changes nothing.
    """

    start: int
    density: float
    probing: bool = True
    costs: Costs = field(default_factory=Costs)
    rest: int = _REST
    pause: int = _REST

    @classmethod
    def first(cls, start: int, budget: Budget) -> Course:
        """The first window: a probe from the least density on."""
        return cls(start, budget.limit(SPREAD * budget.least), pause=_REST // 2)

    def levels(self, budget: Budget) -> tuple[float, float]:
        """The densities of a probe. The least one cannot be divided: there a larger one is tried."""
        low = budget.limit(self.density / SPREAD)
        return low, budget.limit(max(self.density, 2 * low))

    def density_at(self, step: int, budget: Budget) -> float:
        if not self.probing:
            return self.density
        return self.levels(budget)[step - self.start >= _HALF]

    def counts(self, step: int) -> bool:
        """Whether a step is timed. The first one of a density is not: its thresholds are evaluated exactly."""
        return step not in (self.start, self.start + _HALF) if self.probing else step != self.start


def decide(course: Course, steps: Sequence[Measured], budget: Budget) -> Course | None:
    """The course of the next window, by the steps of this one; None if they are too few.

    A pure function of numbers that all ranks have agreed on.
    """
    counts = {density: sum(step.density == density for step in steps) for density in {s.density for s in steps}}
    wanted_levels = len({*course.levels(budget)}) if course.probing else 1
    if len(counts) < wanted_levels or min(counts.values(), default=0) < _FEWEST:
        return None
    surprise = 0.0 if course.probing else _surprise(course, steps, budget)
    costs = _fit(course, steps, surprise)
    low, high = min(counts), max(counts)
    wanted = min(_largest(costs, course.costs, budget), budget.limit(SPREAD * high))
    stays = surprise < 0 or _is_near(wanted, course.density, budget)
    density = course.density if stays else wanted
    probing = surprise != 0 or not low / TOLERANCE <= density <= high * TOLERANCE
    if probing or not stays:
        return replace(course, density=density, probing=probing, costs=costs, rest=_REST, pause=_REST)
    if course.probing:  # it was right
        pause = min(_LONGEST_REST, 2 * course.pause)
        return replace(course, probing=False, costs=costs, rest=pause, pause=pause)
    return replace(course, probing=course.rest <= 1, costs=costs, rest=course.rest - 1)


def _surprise(course: Course, steps: Sequence[Measured], budget: Budget) -> float:
    """How much longer a resting window was exposed than predicted, in seconds; 0 if that is within tolerance."""
    expected = course.costs.exposed(course.density)
    more = median(step.exposed for step in steps) - expected
    least = (TOLERANCE - 1) * max(expected, budget.share * course.costs.base)
    return more if abs(more) > least else 0.0


def _fit(course: Course, steps: Sequence[Measured], surprise: float) -> Costs:
    """The model by the steps of a window. A resting one tells the slope only if it is taken to have changed."""
    before, of_density = course.costs, {step.density for step in steps}
    low, high = min(of_density), max(of_density)
    fixed, slope = before.fixed, before.slope
    if high > low:
        exposed = [median(step.exposed for step in steps if step.density == level) for level in (low, high)]
        slope = max(0.0, (exposed[1] - exposed[0]) / (high - low))
        if course.rest == 0 and before.slope / _SAME_LINK <= slope <= before.slope * _SAME_LINK:
            slope = (slope + before.slope) / 2
        fixed = median(step.exposed - slope * step.density for step in steps)
    elif surprise:
        slope = max(0.0, slope + surprise / high)
    costs = Costs(fixed, slope)
    return replace(costs, base=max(0.0, median(s.period - costs.dependent(s.density) for s in steps)))


def _largest(costs: Costs, before: Costs, budget: Budget) -> float:
    """The largest density within the budget; no more than 1 % if fixed costs alone exceed it."""
    room = budget.share * costs.base
    largest = (room - min(0.0, costs.fixed)) / costs.slope if costs.slope > 0 else budget.most
    fitted = before.base > 0 and not before.exceed(budget)
    if costs.fixed > room * (TOLERANCE if fitted else 1.0):  # just above is no reason to turn back
        largest = min(largest, LEAST_DENSITY)
    return budget.limit(largest)


def _is_near(wanted: float, density: float, budget: Budget) -> bool:
    """Whether a density can stay. The ends of the range are taken exactly."""
    if wanted in (budget.least, budget.most):
        return wanted == density
    return 1 / TOLERANCE <= wanted / density <= TOLERANCE


def explain(course: Course, budget: Budget) -> str:
    """Why the density is what it is, in words."""
    costs, density, room = course.costs, course.density, budget.share * course.costs.base
    allowed = f"the budget of {_ms(room)} ({100 * budget.share:.3g} % of a step)"
    if density <= max(budget.least, LEAST_DENSITY) and costs.exceed(budget):
        return f"fixed costs alone (latency, control messages, selection: {_ms(costs.fixed)}) exceed {allowed}"
    said = f"it takes {_ms(costs.dependent(density))} of {allowed}; {_ms(max(0.0, costs.fixed))} are fixed costs"
    if density >= budget.most:
        return f"{said}; it is the largest that is chosen"
    if density <= budget.least:
        return f"{said}; it is the smallest that is chosen, unless min_density= is given"
    return said


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
