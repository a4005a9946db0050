"""Gaussiank: a threshold from a normal fit instead of an exact top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..feedback.accumulator import Accumulator
from ..wire.sparse_comm import SparseCommunicator
from .base import Algorithm, Reduction
from .selection import select_gaussian
from .topka import gather_all


@dataclass(frozen=True)
class Gaussiank(Algorithm):
    """Selects by the threshold that a normal distribution fitted to |acc| gives for k, then gathers like TopkA.

    Gradients are not normal, so the threshold is refined by counting until 2k/3 to 4k/3 entries are above it.
    Words sent per rank: about 2k(P-1). Messages: ceil(log2 P).

    Args:
        rounds: Refinements at most; then the top k are selected exactly.
    """

    name: ClassVar[str] = "gaussiank"
    band: ClassVar[tuple[float, float]] = (2 / 3, 4 / 3)
    rounds: int = 8

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        with comm.stopwatch.stage("select"):
            chosen = select_gaussian(acc, k, self.rounds)
        return gather_all(comm, chosen, max(k, 4 * k // 3), state, state)
