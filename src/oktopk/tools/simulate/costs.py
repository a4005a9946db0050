"""γ: what the work of a rank costs on this machine, measured with as many ranks at once as its cores will have.

The timing is done by `timing.py`, in processes of its own. It is processor time; ranks that share a core compute
at the same time, so that each takes as many times longer.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from oktopk.tools.cores import own_cores

from .processes import run_all
from .replay import Prices

_SMALLEST, _LARGEST = 1 << 12, 4_000_000
"""Entries of the tensor that is timed; beyond the caches, time grows in proportion."""
_MOST_CORES = 8
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Step:
    """Seconds for each entry of the tensor, of a rank that is alone, before and after it would communicate."""

    before: float
    after: float


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
        return Prices(**asdict(self.coding) | {"before": step.before * size, "after": step.after * size})


def measure(algorithms: Sequence[str], size: int, density: float, ranks_per_core: int = 1) -> Costs:
    """Time the algorithms on as many processes at once as ranks would share the cores."""
    size = max(_SMALLEST, min(size, _LARGEST))
    cores = min(len(own_cores()), _MOST_CORES)
    task = json.dumps({"algorithms": list(algorithms), "size": size, "density": density, "cores": cores})
    said = run_all("oktopk.tools.simulate.timing", [task], [{}] * cores * ranks_per_core, _TIMEOUT)
    found = [json.loads(words) for words in said]

    def middle(numbers: Iterable[float]) -> float:
        return ranks_per_core * float(statistics.median(numbers))

    steps = {
        when: {
            name: Step(*(middle(one[when][name][part] for one in found) / size for part in range(2)))
            for name in algorithms
        }
        for when in ("exact", "steady")
    }
    coding = Prices(**{name: middle(one["coding"][name] for one in found) for name in found[0]["coding"]})
    return Costs(size, ranks_per_core, steps["exact"], steps["steady"], coding)
