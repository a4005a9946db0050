"""TopkA: all-gather of every rank's top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..feedback.accumulator import Accumulator
from ..wire.message import max_message_bytes
from ..wire.sparse_comm import SparseCommunicator
from .base import Algorithm, Reduction, reduced, skip
from .selection import Chosen, select_exact

LARGEST = 0.999 * torch.finfo(torch.float32).max
"""A mean above this may have rounded to infinity on the way."""


@dataclass(frozen=True)
class TopkA(Algorithm):
    """Exact local top-k, all-gathered and summed; the result has up to kP entries.

    Words sent per rank: 2k(P-1). Messages: ceil(log2 P). Everything sent leaves the residual. The state is the
    last threshold, which saves the next selection a search.
    """

    name: ClassVar[str] = "topka"

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        with comm.stopwatch.stage("select"):
            chosen = select_exact(acc, k, state)
        return gather_all(comm, chosen, k, state, chosen.threshold)


def gather_all(comm: SparseCommunicator, chosen: Chosen, limit: int, state: Any, next_state: Any) -> Reduction:
    """All-gather what each rank selected, at most `limit` entries."""
    comm.check_finite(chosen.finite)
    capacity = max_message_bytes(limit, comm.size, comm.values)
    parts = comm.all_gather(chosen.vector, capacity, limit=limit)
    largest_mean = sum(float(p.values.abs().max()) for p in parts if len(p)) / comm.world
    comm.check_finite(largest_mean < LARGEST)  # all ranks have the same parts and agree
    if comm.nonfinite:
        return skip(state)
    return reduced(chosen, parts, [parts[comm.rank]], next_state)
