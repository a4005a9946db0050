"""What an algorithm is, and the sparse reduce-scatter that two of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..feedback.accumulator import Accumulator
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import SparseVector, all_finite, sum_in_region


@dataclass(frozen=True)
class Reduction:
    """What an allreduce came to, on one rank.

    The sum over ranks is that of `parts`, added in order (the same on every rank), or P times `mean`.
    `leaving` is what has left this rank's residual; a negative entry came to it. `skipped` means that some rank
    met a non-finite number: all ranks return this, and nothing else in here counts.
    """

    parts: Sequence[SparseVector] = ()
    mean: Tensor | None = None
    leaving: Sequence[SparseVector] = ()
    state: Any = None
    local_count: int = 0
    threshold: float = 0.0
    global_threshold: float = 0.0
    exact: bool = False
    global_exact: bool = False
    skipped: bool = False


@dataclass(frozen=True)
class Algorithm(ABC):
    """A sparse allreduce. Its fields are its hyper-parameters; what it learns from step to step is `state`."""

    name: ClassVar[str]
    band: ClassVar[tuple[float, float]] = (3 / 4, 5 / 4)
    """The count a rank selects stays within these multiples of k."""

    @abstractmethod
    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        """Sum over all ranks what each selects of its acc, about k entries.

        `state` is what the last reduction of this bucket returned, or None. A skipped step must leave it as it
        was. Nothing is written to acc: the caller releases and finishes.
        """

    def state_problem(self, state: object, size: int) -> str | None:
        """What is wrong with a state that was handed in for a tensor of this size."""
        if isinstance(state, float):  # a last threshold: only tells where to look first
            return None
        return foreign_state(state)

    def pack_state(self, state: Any) -> Any:
        """The state as primitives, for a checkpoint."""
        return state

    def unpack_state(self, packed: Any) -> Any:
        """The state that pack_state took apart."""
        return packed


def foreign_state(state: object) -> str:
    return f"state must come from an earlier call with this algorithm, got {type(state).__name__}"


def skip(state: Any) -> Reduction:
    return Reduction(state=state, skipped=True)


def equal_regions(size: int, world: int) -> list[int]:
    """Edges of `world` contiguous regions; the first size mod world of them are one longer."""
    quotient, remainder = divmod(size, world)
    return [r * quotient + min(r, remainder) for r in range(world + 1)]


def split_and_reduce(
    comm: SparseCommunicator, local: SparseVector, edges: Sequence[int], limit: int
) -> tuple[SparseVector, SparseVector]:
    """Sparse reduce-scatter: each entry goes to the owner of its region, who adds up in a fixed order.

    Returns the sums of the own region, and the local selection as its receivers saw it.
    """
    rank = comm.rank
    sent, incoming = comm.exchange(local.split(edges), edges, limit)
    sums = sum_in_region(chain([sent[rank]], incoming), edges[rank], edges[rank + 1], local.size)
    comm.check_finite(all_finite(sums.values))
    return sums, local.with_values(torch.cat([part.values for part in sent]))


def rounding_error(exact: SparseVector, seen: SparseVector) -> list[SparseVector]:
    """What a lossy message lost comes back to its sender: as an entry of `leaving`, if there is any."""
    if seen.values is exact.values:
        return []
    return [exact.with_values(seen.values - exact.values)]


def reduce_step(
    algorithm: Algorithm,
    comm: SparseCommunicator,
    acc: Accumulator,
    k: int,
    state: Any,
    inspect: Callable[[Accumulator], None] | None = None,
) -> tuple[Reduction, int]:
    """Run the algorithm and settle the outcome: acc becomes the mean, the residual keeps the rest.

    Returns the reduction and the number of entries in the mean: its non-zeros, or all of them if it is dense.
    When the reduction is skipped, the mean is zero and the residual is what it was before, to the bit; `inspect`
    gets to see acc before that.
    """
    if acc.size == 0:
        return Reduction(state=state), 0
    try:
        reduction = algorithm.reduce(comm, acc, k, state)
    except BaseException:
        acc.rollback()  # nothing has been applied: the gradient must not count twice when the step is repeated
        raise
    if reduction.skipped:
        if inspect is not None:
            inspect(acc)
        acc.rollback()
        return replace(reduction, state=state), 0
    if reduction.mean is not None:
        acc.write_dense_mean(reduction.mean)
        return reduction, acc.size
    acc.release(reduction.leaving)
    return reduction, acc.finish(reduction.parts, comm.world)
