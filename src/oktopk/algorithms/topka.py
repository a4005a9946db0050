"""TopkA: everybody's top-k, gathered by everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..feedback.accumulator import Accumulator
from ..wire import message as wire
from ..wire.sparse_comm import SparseCommunicator
from .base import Algorithm, Reduction, skip
from .selection import Chosen, select_exact

LARGEST = 0.999 * torch.finfo(torch.float32).max
"""Where a mean of gathered values begins to be in danger of rounding to infinity."""


@dataclass(frozen=True)
class TopkA(Algorithm):
    """Exact local top-k, all-gathered and summed; the result has up to kP entries.

    Words sent per rank: 2k(P-1). Messages: ceil(log2 P). Nothing that is sent can be refused, so all of it
    leaves the residual. The state is the last threshold, which tells the selection where to look first.
    """

    name: ClassVar[str] = "topka"

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        with comm.stopwatch.stage("select"):
            chosen = select_exact(acc, k, state)
        return gather_all(comm, chosen, k, state, chosen.threshold)


def gather_all(comm: SparseCommunicator, chosen: Chosen, limit: int, state: Any, next_state: Any) -> Reduction:
    """All-gather what each rank has chosen, at most `limit` entries."""
    comm.check_finite(chosen.finite)
    capacity = wire.capacity(limit, comm.size, comm.values)
    parts = comm.all_gather(chosen.vector, capacity)
    largest_mean = sum(float(p.values.abs().max()) for p in parts if len(p)) / comm.world
    comm.check_finite(largest_mean < LARGEST)  # all ranks have the same parts and find the same
    if comm.nonfinite:
        return skip(state)
    own = parts[comm.rank]
    return Reduction(
        parts=parts,
        leaving=[own],
        state=next_state,
        local_count=len(own),
        threshold=chosen.threshold,
        exact=chosen.exact,
    )
