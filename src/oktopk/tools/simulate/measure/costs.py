"""γ: what the work of a rank costs on this machine, measured with as many ranks at once as its cores will have.

The timing is done by `timing.py`, in processes of its own. It is processor time; ranks that share a core compute
at the same time, so that each takes as many times longer.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oktopk.tools.cores import own_cores

from ..trace.replay import Prices
from .processes import run_all

_SMALLEST, _LARGEST = 1 << 12, 4_000_000
"""Entries of the tensor that is timed; beyond the caches, time grows in proportion."""
_MOST_CORES = 8
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Step:
    """Seconds of a rank's step beyond the work that is recorded."""

    before: float
    """For each entry of the tensor, ahead of the first message: absorbing the gradient and selecting."""
    after: float
    """For each entry of the tensor: everything else."""
    fixed: float = 0.0
    """Whatever the size."""
    part: float = 0.0
    """For each part of a message that is received."""


@dataclass(frozen=True)
class Costs:
    """What was measured."""

    size: int
    ranks_per_core: int
    exact: dict[str, Step]
    """By algorithm, a step that evaluates thresholds exactly."""
    steady: dict[str, Step]
    coding: Prices

    def prices(self, algorithm: str, size: int, *, exact: bool = False) -> Prices:
        step = (self.exact if exact else self.steady)[algorithm]
        return replace(
            self.coding,
            before=step.before * size,
            after=step.after * size + step.fixed,
            decode_part=self.coding.decode_part + step.part,
        )


def measure(algorithms: Sequence[str], size: int, density: float, ranks_per_core: int = 1) -> Costs:
    """Time the algorithms on as many processes at once as ranks would share the cores."""
    size = max(_SMALLEST, min(size, _LARGEST))
    cores = min(len(own_cores()), _MOST_CORES)
    task = json.dumps({"algorithms": list(algorithms), "size": size, "density": density, "cores": cores})
    said = run_all("oktopk.tools.simulate.measure.timing", [task], [{}] * cores * ranks_per_core, _TIMEOUT)
    found = [json.loads(words) for words in said]

    def middle(figures: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: ranks_per_core * statistics.median(one[name] for one in figures) for name in figures[0]}

    exact, steady = (
        {name: Step(**middle([one[when][name] for one in found])) for name in algorithms}
        for when in ("exact", "steady")
    )
    return Costs(size, ranks_per_core, exact, steady, Prices(**middle([one["coding"] for one in found])))
