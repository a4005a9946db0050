"""When steps are dense, and how dense the sparse ones are."""

from __future__ import annotations

import math
from dataclasses import dataclass

RAMP_FROM = 0.25


@dataclass(frozen=True)
class Schedule:
    """Steps 0 … warmup_steps - 1 are dense; then, if asked for, the density comes down by the same factor on
    each of ramp_steps steps, from 25 % to the one that stays.

    >>> Schedule(0.01, warmup_steps=2, ramp_steps=0).density_at(1) is None
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
