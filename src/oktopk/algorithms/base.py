"""The interface of an algorithm, and the sparse reduce-scatter that two of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm import Digest
from ..feedback.accumulator import Accumulator
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import SparseVector, all_finite, sum_in_region
from .selection import Chosen


@dataclass(frozen=True)
class Reduction:
    """The result of a sparse all-reduce on one rank.

    Attributes:
        parts: Sparse vectors whose sum, added in this order, is the sum over ranks; the same on every rank.
        mean: The dense mean instead of parts, for a dense algorithm.
        leaving: What to subtract from this rank's residual. A negative value adds to it.
        state: What the algorithm remembers for the next step.
        local_count: Entries that this rank selected.
        threshold: Magnitude from which on this rank selected.
        global_threshold: Magnitude from which on sums survived, for Ok-Topk.
        exact: The local threshold was evaluated over all entries.
        global_exact: The global threshold was evaluated over all sums.
        skipped: Some rank saw a non-finite number. Every rank returns this, and the other fields are meaningless.
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
    """A sparse all-reduce: the base class of every algorithm.

    A subclass is a frozen dataclass whose fields are its hyper-parameters. It implements reduce(); what it learns
    from step to step is in `state`, which goes in and out. An instance can be passed wherever a name can.

    Attributes:
        name: The name in oktopk.ALGORITHMS.
        band: The number of entries a rank selects stays within these multiples of k.
        takes_plugins: Whether it can send values by the codec of a plug-in.

    Example:
        Select by magnitude, without communication:

        >>> import oktopk
        >>> import torch
        >>> from oktopk.algorithms import Reduction
        >>> class Local(oktopk.Algorithm):
        ...     name = "local"
        ...     def reduce(self, comm, acc, k, state):
        ...         top, _ = acc.vector(acc.select(0.0, acc.size)).largest(k)
        ...         return Reduction(parts=[top], leaving=[top], local_count=k)
        >>> mean, _ = oktopk.sparse_allreduce(torch.tensor([1.0, -3.0, 2.0]), density=0.4, algorithm=Local())
        >>> mean.tolist()
        [0.0, -3.0, 0.0]
    """

    name: ClassVar[str]
    band: ClassVar[tuple[float, float]] = (3 / 4, 5 / 4)
    takes_plugins: ClassVar[bool] = True

    @abstractmethod
    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        """Add up over all ranks about k entries that each selects from its accumulator.

        Must not write to acc: the caller commits or rolls back.

        Args:
            comm: Sends and receives sparse vectors, and carries the non-finite flag.
            acc: residual + gradient of this rank.
            k: Entries to select.
            state: What the last reduction of this bucket returned, or None. A skipped step returns it unchanged.
        """

    def state_problem(self, state: object, size: int) -> str | None:
        """Say why a state does not fit a tensor of this size; None if it does."""
        if not isinstance(state, float):  # the last threshold: only a hint for the selection
            return foreign_state(state)
        return None if 0 <= state < math.inf else f"state must be a finite threshold, got {state}"

    def pack_state(self, state: Any) -> Any:
        """Convert the state to primitives for a checkpoint."""
        return state

    def unpack_state(self, packed: Any) -> Any:
        """Restore the state from pack_state()."""
        return packed


def foreign_state(state: object) -> str:
    return f"state must come from an earlier call with this algorithm, got {type(state).__name__}"


def reduced(
    chosen: Chosen, parts: Sequence[SparseVector], leaving: Sequence[SparseVector], state: Any
) -> Reduction:
    """The reduction of what this rank has chosen."""
    count, threshold = len(chosen.vector), chosen.threshold
    return Reduction(parts, None, leaving, state, count, threshold, exact=chosen.exact)


def digest_of(comm: SparseCommunicator, reduction: Reduction) -> Digest:
    """A digest of what must be the same on all ranks: the messages of the result, and what the ranks share."""
    shared = () if reduction.skipped else getattr(reduction.state, "shared", ())
    return comm.digest.copy().add(repr((reduction.skipped, shared)).encode())


def skip(state: Any) -> Reduction:
    return Reduction(state=state, skipped=True)


def equal_regions(size: int, world: int) -> list[int]:
    """Edges of `world` contiguous regions; the first size mod world of them are one longer."""
    quotient, remainder = divmod(size, world)
    return [r * quotient + min(r, remainder) for r in range(world + 1)]


def split_and_reduce(
    comm: SparseCommunicator, local: SparseVector, edges: Sequence[int], limit: int
) -> tuple[SparseVector, SparseVector]:
    """Sparse reduce-scatter: each entry goes to the owner of its region, which adds up in a fixed order.

    Returns the sums of this rank's region, and the local selection as its receivers decoded it.
    """
    rank = comm.rank
    sent, incoming = comm.exchange(local.split(edges), edges, limit)
    sums = sum_in_region(chain([sent[rank]], incoming), edges[rank], edges[rank + 1], local.size)
    comm.check_finite(all_finite(sums.values))
    return sums, local.with_values(torch.cat([part.values for part in sent]))


def rounding_error(exact: SparseVector, seen: SparseVector) -> list[SparseVector]:
    """The rounding error of a lossy message, as entries of `leaving`: it stays in the sender's residual."""
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
    confirm: Callable[[Reduction], None] | None = None,
) -> tuple[Reduction, int]:
    """Run the algorithm, then commit: `acc.works` become the mean and the residual keeps what was not sent.

    If the step is skipped, `inspect` is called with acc first; then acc rolls back: the mean is zero and the
    residual is what it was, to the bit. So does an error of `confirm`, which gets the reduction before anything is
    committed or skipped.

    Returns the reduction and the number of entries in the mean: its non-zeros, or all entries if it is dense.
    """
    if acc.size == 0:
        return Reduction(state=state), 0
    try:
        reduction = algorithm.reduce(comm, acc, k, state)
        if confirm is not None:
            confirm(reduction)
    except BaseException:
        acc.rollback()  # a repeated step must not add the gradient twice
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
    return reduction, acc.write_mean(reduction.parts, comm.world)
