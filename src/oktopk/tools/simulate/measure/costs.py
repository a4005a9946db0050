"""γ: measure the CPU time of a rank's work, with as many ranks at once as the cores will have.

`timing.py` measures CPU time in separate processes. Ranks that share a core compute at the same time, so each
takes as many times longer.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from oktopk.tools.cores import available_cores

from ..trace.replay import Prices
from .processes import run_all

_SMALLEST, _LARGEST = 1 << 12, 4_000_000
"""Limits on the entries of the timed tensor; beyond the caches, time is proportional to size."""
_MOST_CORES = 8
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Step:
    """Seconds of a rank's step in addition to the recorded work."""

    before: float
    """Per entry of the tensor, before the first message: accumulating the gradient and selecting."""
    after: float
    """Per entry of the tensor: everything else."""
    fixed: float = 0.0
    """Independent of the size."""
    part: float = 0.0
    """Per received part of a message."""


@dataclass(frozen=True)
class Costs:
    """The measured costs."""

    size: int
    ranks_per_core: int
    exact: dict[str, Step]
    """By algorithm, for a step with exact thresholds."""
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
    """Time the algorithms on as many processes at once as there will be ranks on the cores."""
    size = max(_SMALLEST, min(size, _LARGEST))
    cores = min(len(available_cores()), _MOST_CORES)
    task = json.dumps({"algorithms": list(algorithms), "size": size, "density": density, "cores": cores})
    outputs = run_all("oktopk.tools.simulate.measure.timing", [task], [{}] * cores * ranks_per_core, _TIMEOUT)
    found = [json.loads(output) for output in outputs]

    def middle(figures: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: ranks_per_core * statistics.median(one[name] for one in figures) for name in figures[0]}

    exact, steady = (
        {name: Step(**middle([one[when][name] for one in found])) for name in algorithms}
        for when in ("exact", "steady")
    )
    return Costs(size, ranks_per_core, exact, steady, Prices(**middle([one["coding"] for one in found])))
