"""Ok-Topk: sparse all-reduce with fewer than 6k words per rank, for any number of ranks.

S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.

    rank 0   [ . a . . | . b . . | c . . . ]        local selection, cut at the regions' edges
    rank 1   [ . d . . | . . . e | . . f . ]
    rank 2   [ . . g . | . h . . | . . i . ]
                 |          |         |             split and reduce: each region's parts go to its owner
             0: a+d g   1: b+h e   2: c f+i         the owner keeps the sums above the global threshold
                 \\__________|_________/             balance and all-gather
    all      [ . a+d . . | . b+h . . | . . f+i . ]  an entry leaves a rank's residual only if that rank sent
                                                    it and it survived
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..comm import Communicator
from ..errors import WireError
from ..feedback.accumulator import Accumulator
from ..kernels import SMALLEST, backend, bin_edge, bin_of, index_dtype
from ..wire.message import max_message_bytes
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import SparseVector
from .base import Algorithm, Reduction, foreign_state, rounding_error, skip, split_and_reduce
from .regions import balance, balanced_regions, check_counts, is_partition
from .selection import (
    BINS,
    TrackedSelection,
    Tracker,
    hard_cap,
    in_band,
    is_count,
    is_threshold,
    nearest_edge,
)

_INFINITY_BITS = 0x7F800000
_FEW = 4096
"""Up to this many candidates for the global threshold are gathered; beyond, histograms of 16 kB are cheaper."""


@dataclass(frozen=True)
class GlobalThreshold:
    """The last global threshold, and the number of steps since it was evaluated exactly."""

    value: float
    age: int = 0

    @property
    def sane(self) -> bool:
        """Whether a threshold that was read from a file can be one."""
        return is_threshold(self.value) and is_count(self.age)


@dataclass(frozen=True)
class OkTopkTracking:
    """What Ok-Topk remembers of a bucket: both thresholds, and the regions."""

    local: Tracker | None = None
    overall: GlobalThreshold | None = None
    edges: tuple[int, ...] = ()
    steps: int = 0

    @property
    def shared(self) -> tuple[object, ...]:
        """The part that must be equal on all ranks."""
        return self.steps, self.overall, self.edges

    def problem(self, size: int) -> str | None:
        """Say what cannot be right of a state that was read from a file; None if it may be right."""
        if self.edges and not is_partition(self.edges, size):
            return f"edges of regions must be integers that rise from 0 to {size}, got {self.edges[:8]}"
        if self.local is not None and not (isinstance(self.local, Tracker) and self.local.is_sane(size)):
            return f"the local threshold is out of range: {self.local}"
        if self.overall is not None and not (isinstance(self.overall, GlobalThreshold) and self.overall.sane):
            return f"the global threshold is out of range: {self.overall}"
        return (
            None if is_count(self.steps) else f"the number of steps must be an integer from 0, got {self.steps!r}"
        )


@dataclass(frozen=True)
class Overall:
    """The global selection: this rank's surviving sums, and how many every rank has."""

    own: SparseVector
    sizes: list[int]
    threshold: GlobalThreshold


@dataclass(frozen=True)
class OkTopk(Algorithm):
    """Words sent per rank: 2k(P-1)/P to split, as many to gather, and at most as many again to balance.

    Messages: P - 1 + ceil(log2 P), and P - 1 more to balance.

    Args:
        tau: Steps between re-partitions of the regions.
        tau_prime: Steps between exact evaluations of the thresholds. A threshold is also evaluated exactly when
            its count leaves the band.
        imbalance: Buffers are balanced when the largest exceeds this multiple of their mean.
    """

    name: ClassVar[str] = "oktopk"
    tau: int = 64
    tau_prime: int = 32
    imbalance: float = 2.0

    def reduce(
        self, comm: SparseCommunicator, acc: Accumulator, k: int, state: OkTopkTracking | None
    ) -> Reduction:
        """One step, in the order of the paper."""
        known = state or OkTopkTracking()
        with comm.stopwatch.stage("select"):
            chosen, tracker = TrackedSelection(self.tau_prime).select(acc, k, known.local)
        comm.check_finite(chosen.finite)

        edges: Sequence[int] = known.edges
        if known.steps % self.tau == 0 or len(edges) != comm.world + 1:
            edges = balanced_regions(comm.transport, chosen.vector)

        sums, sent = split_and_reduce(comm, chosen.vector, edges, hard_cap(k))
        overall = self._select_overall(comm, sums, edges, k, known.overall)
        if overall is None:
            return skip(state)

        winners, lost = self._balance_and_gather(comm, overall, edges)
        if comm.nonfinite:
            return skip(state)
        return Reduction(
            parts=[winners],
            leaving=[sent.common(winners), *lost],
            state=replace(
                known, local=tracker, overall=overall.threshold, edges=tuple(edges), steps=known.steps + 1
            ),
            local_count=len(chosen.vector),
            threshold=chosen.threshold,
            global_threshold=overall.threshold.value,
            exact=chosen.exact,
            global_exact=overall.threshold.age == 0,
        )

    def state_problem(self, state: object, size: int) -> str | None:
        if not isinstance(state, OkTopkTracking):
            return foreign_state(state)
        if state.edges and state.edges[-1] != size:
            return f"state size mismatch: it comes from a tensor of {state.edges[-1]} entries, this one has {size}"
        return state.problem(size)

    def pack_state(self, state: OkTopkTracking | None) -> dict[str, Any] | None:
        return None if state is None else asdict(state)

    def unpack_state(self, packed: dict[str, Any] | None) -> OkTopkTracking | None:
        if packed is None:
            return None
        local, overall = packed["local"], packed["overall"]
        return OkTopkTracking(
            local=None if local is None else Tracker(**local),
            overall=None if overall is None else GlobalThreshold(**overall),
            edges=tuple(packed["edges"]),
            steps=packed["steps"],
        )

    def _select_overall(
        self,
        comm: SparseCommunicator,
        sums: SparseVector,
        edges: Sequence[int],
        k: int,
        last: GlobalThreshold | None,
    ) -> Overall | None:
        """Select about k sums over all regions, by a threshold that all ranks share.

        One small all-gather carries each owner's histogram of magnitudes around the last threshold. From it every
        rank derives the threshold of this step and how many entries each owner keeps. If any sum is non-finite,
        every rank returns None.
        """
        first = 0 if last is None else max(1, bin_of(last.value) - BINS)
        histogram = backend(sums.values).magnitude_histogram(sums.values, first, 2 * BINS)
        counts = [int(comm.nonfinite), *histogram]  # every count fits an index
        reports = np.array(comm.transport.all_gather_ints(counts, "counts", index_dtype(comm.size)))
        check_counts(comm.transport, reports[:, 1:], edges, comm.world * hard_cap(k))
        if reports[:, 0].any():
            return None
        best, count = nearest_edge(reports[:, 1:].sum(0).tolist(), k)
        due = last is None or last.age + 1 >= self.tau_prime or k == comm.size
        if last is not None and not due and 0 < best < 2 * BINS - 1 and in_band(count, k):
            threshold = GlobalThreshold(bin_edge(first + best), last.age + 1)
            sizes = reports[:, 1 + best :].sum(1).tolist()
            return Overall(sums.at_least(threshold.value), sizes, threshold)
        value, own, sizes = exact_overall(comm.transport, sums, k)
        check_counts(comm.transport, np.array(sizes)[:, None], edges, comm.world * hard_cap(k))
        return Overall(own, sizes, GlobalThreshold(value))

    def _balance_and_gather(
        self, comm: SparseCommunicator, overall: Overall, edges: Sequence[int]
    ) -> tuple[SparseVector, list[SparseVector]]:
        """Gather the survivors of all ranks. Also returns the rounding errors for this rank's residual."""
        own, sizes = overall.own, overall.sizes
        lost: list[SparseVector] = []
        mean = -(-sum(sizes) // comm.world)
        regions: Sequence[int] | None = edges
        if max(sizes) > self.imbalance * mean:
            own, lost, sizes = balance(comm, own, sizes, edges)
            regions = None
        capacity = max_message_bytes(max(sizes), comm.size, comm.values)
        parts = comm.all_gather(own, capacity, regions, counts=sizes)
        return comm.join(parts), [*lost, *rounding_error(own, parts[comm.rank])]


def exact_overall(comm: Communicator, sums: SparseVector, k: int) -> tuple[float, SparseVector, list[int]]:
    """Select exactly the k largest sums over all ranks.

    The lowest index wins a tie: regions are in rank order, so lower ranks take theirs first. Returns the
    threshold, this rank's survivors, and how many every rank has.
    """
    threshold = 0.0 if k == sums.size else max(SMALLEST, kth_over_ranks(comm, sums, k))
    magnitude = sums.values.abs()
    larger, equal = magnitude > threshold, magnitude == threshold
    reports = comm.all_gather_ints([int(larger.sum()), int(equal.sum())], "exact counts")
    room = k - sum(count for count, _ in reports)
    sizes, my_ties = [], 0
    for rank, (count, ties) in enumerate(reports):
        taken = min(ties, max(0, room))
        room -= taken
        sizes.append(count + taken)
        if rank == comm.rank:
            my_ties = taken
    larger[torch.nonzero(equal).flatten()[:my_ties]] = True
    return threshold, sums[larger], sizes


def kth_over_ranks(comm: Communicator, sums: SparseVector, k: int) -> float:
    """The k-th largest magnitude over all ranks, 0 if there are fewer.

    A few candidates are gathered. For more, three small histograms find the answer 11, 11 and 10 bits at a time:
    positive floats are ordered like their bits.
    """
    if comm.world * k <= _FEW:
        own = sums.values.abs().cpu()
        own = own.topk(min(k, own.numel())).values
        gathered = comm.all_gather_sealed(own, 4 * k, "magnitudes")
        for rank, theirs in enumerate(gathered):
            if not bool(((theirs >= 0) & theirs.isfinite()).all()):
                who = comm.global_rank(rank)
                raise WireError(f"all_gather (magnitudes): rank {who} sent numbers that are no magnitudes")
        candidates = torch.cat(gathered)
        return candidates.topk(k).values[-1].item() if candidates.numel() >= k else 0.0
    bits = sums.values.abs().cpu().contiguous().view(torch.int32).to(torch.int64)
    prefix = 0
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        histogram = torch.bincount((bits >> shift) & ((1 << width) - 1), minlength=1 << width)
        if comm.world > 1:
            comm.all_reduce_(histogram, "histogram", control=True)
        if int(histogram.min()) < 0:
            raise WireError(f"all_reduce (histogram): the counts of all ranks add up to {int(histogram.min())}")
        from_top = histogram.flip(0).cumsum(0)
        if int(from_top[-1]) < k:
            return 0.0
        place = int(torch.searchsorted(from_top, k))
        digit = (1 << width) - 1 - place
        k -= int(from_top[place - 1]) if place else 0
        bits = bits[(bits >> shift) & ((1 << width) - 1) == digit]
        prefix |= digit << shift
    if prefix >= _INFINITY_BITS:
        raise WireError("all_reduce (histogram): by the counts of all ranks the threshold is not finite")
    return torch.tensor(prefix, dtype=torch.int32).view(torch.float32).item()
