"""Events in memory, for notebooks, tests and the summary at the end of an epoch."""

from __future__ import annotations

from collections import deque
from math import fsum

from ..events import ReductionEvent, StepEvent
from .base import Sink
from .flat import LABELS, flat_step


class MemorySink(Sink):
    """Keeps all steps, or the last `limit` of them."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        super().__init__()
        self._steps: deque[StepEvent] = deque(maxlen=limit)

    @property
    def steps(self) -> list[StepEvent]:
        """A copy: it stays what it is while training goes on."""
        return list(self._steps)

    @property
    def reductions(self) -> list[ReductionEvent]:
        return [reduction for step in self.steps for reduction in step.reductions]

    def clear(self) -> None:
        """Forget all steps, as at the start of an epoch."""
        self._steps.clear()

    def by_phase(self) -> dict[str, dict[str, float]]:
        """For each phase that had a step: how many "steps", and the mean of everything a step measures.

        A step without a finite number for some measure does not count in its mean; a measure without any such
        number is left out. `skipped` is the share of skipped steps.
        """
        rows: dict[str, list[dict[str, float]]] = {}
        for step in self.steps:
            row = {k: float(v) for k, v in flat_step(step).items() if k not in LABELS and v is not None}
            rows.setdefault(step.phase, []).append(row)
        return {phase: {"steps": float(len(of_phase)), **_means(of_phase)} for phase, of_phase in rows.items()}

    def _write(self, event: StepEvent) -> None:
        self._steps.append(event)


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: fsum(values) / len(values) for name, values in columns.items()}
