"""TopkDSA: SparCML's split all-gather, dense where the sums fill in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..feedback.accumulator import Accumulator
from ..kernels import index_dtype
from ..wire.message import max_region_bytes
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import SparseVector
from .base import Algorithm, Reduction, equal_regions, reduced, rounding_error, skip, split_and_reduce
from .selection import select_exact


@dataclass(frozen=True)
class TopkDSA(Algorithm):
    """Exact local top-k; equal regions; sparse reduce-scatter; then all sums are gathered.

    Each owner sends its sums as (index, value) pairs while that is smaller than its region, and the whole region
    otherwise. Words sent per rank: 4k(P-1)/P if the ranks agree on what is large, up to
    (2k + n)(P-1)/P if they do not. Messages: P - 1 + ceil(log2 P). Everything sent leaves the residual.
    """

    name: ClassVar[str] = "topkdsa"

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        with comm.stopwatch.stage("select"):
            chosen = select_exact(acc, k, state)
        comm.check_finite(chosen.finite)
        edges = equal_regions(acc.size, comm.world)
        sums, sent = split_and_reduce(comm, chosen.vector, edges, k)
        sums = sums[sums.values != 0]

        start, stop = edges[comm.rank], edges[comm.rank + 1]
        if 2 * len(sums) >= stop - start:
            sums = _store_zeros(sums, start, stop)
        capacity = max_region_bytes(edges[1] - edges[0], comm.values)
        parts = comm.all_gather(sums, capacity, edges)
        if comm.nonfinite:
            return skip(state)
        leaving = [sent, *rounding_error(sums, parts[comm.rank])]
        return reduced(chosen, parts, leaving, chosen.threshold)


def _store_zeros(sums: SparseVector, start: int, stop: int) -> SparseVector:
    """The same vector with every entry of the region stored, zeros included."""
    values = torch.zeros(stop - start, device=sums.values.device)
    values[sums.indices.long() - start] = sums.values
    indices = torch.arange(start, stop, dtype=index_dtype(sums.size), device=values.device)
    return SparseVector(indices, values, sums.size)
