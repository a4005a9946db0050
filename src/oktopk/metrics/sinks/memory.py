"""Events in memory, for notebooks, tests and summaries."""

from __future__ import annotations

from collections import deque
from math import fsum

from ..events import ReductionEvent, StepEvent
from .base import Sink
from .flat import LABELS, flat_step


class MemorySink(Sink):
    """Keeps the events of the last steps.

    Args:
        limit: Steps to keep; None keeps all of them.

    Example:
        >>> import oktopk, torch
        >>> from oktopk.metrics.sinks import MemorySink
        >>> sink = MemorySink()
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with oktopk.AllReducer(parameters, density=0.1, warmup_steps=1, sinks=[sink]) as reducer:
        ...     for _ in range(3):
        ...         grads = reducer.sync({"w": torch.arange(50.0)})
        >>> [step.phase for step in sink.steps]
        ['dense', 'sparse', 'sparse']
        >>> sink.by_phase()["sparse"]["steps"]
        2.0
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        super().__init__()
        self._steps: deque[StepEvent] = deque(maxlen=limit)

    @property
    def steps(self) -> list[StepEvent]:
        """The events of the steps: a copy, which does not change while training continues."""
        return list(self._steps)

    @property
    def reductions(self) -> list[ReductionEvent]:
        """The events of all reductions of these steps."""
        return [reduction for step in self.steps for reduction in step.reductions]

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def by_phase(self) -> dict[str, dict[str, float]]:
        """Average the steps of each phase ("dense", "sparse").

        Returns:
            For each phase with at least one step: the number of "steps", and the mean of every numeric column of a
            step over the steps where it is finite. `skipped` is the share of skipped steps.
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
