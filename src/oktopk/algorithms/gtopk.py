"""gTopk: the top-k of top-k selections, merged along a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..feedback.accumulator import Accumulator
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import all_finite, sum_in_region
from .base import Algorithm, Reduction, reduced, rounding_error, skip
from .selection import select_exact


@dataclass(frozen=True)
class GTopk(Algorithm):
    """Exact local top-k; pairs of ranks merge theirs and keep the k largest; rank 0 broadcasts the final k.

        P = 6:   4 -> 0, 5 -> 1   (the ranks beyond the largest power of two fold in first)
                 1 -> 0, 3 -> 2
                 2 -> 0           and back by a binomial broadcast

    At most 2k words per message and 2 ceil(log2 P) messages in a row at the root: 4k log P words. What a merge
    drops stays in the residual of the rank that drops it.
    """

    name: ClassVar[str] = "gtopk"

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        with comm.stopwatch.stage("select"):
            chosen = select_exact(acc, k, state)
        comm.check_finite(chosen.finite)
        held, leaving = chosen.vector, [chosen.vector]
        for peer, receives in merges(comm.rank, comm.world):
            if not receives:
                leaving += rounding_error(held, comm.send(held, peer))
                break
            merged = sum_in_region([held, comm.recv(peer, k)], 0, acc.size, acc.size)
            comm.check_finite(all_finite(merged.values))
            held, dropped = merged.largest(k)
            back = acc.at(dropped.indices) + dropped.values  # what the residual of this rank would hold
            comm.check_finite(all_finite(back))
            leaving.append(dropped.with_values(-dropped.values))

        result = comm.broadcast(held if comm.rank == 0 else None, k)
        if comm.nonfinite:
            return skip(state)
        if comm.rank == 0:
            leaving += rounding_error(held, result)
        return reduced(chosen, [result], leaving, chosen.threshold)


def merges(rank: int, world: int) -> list[tuple[int, bool]]:
    """The peers of a rank on its way up the tree, and whether it receives from them. Only the last may be a send.

    >>> [merges(rank, 6) for rank in range(6)]  # doctest: +NORMALIZE_WHITESPACE
    [[(4, True), (1, True), (2, True)], [(5, True), (0, False)], [(3, True), (0, False)], [(2, False)],
     [(0, False)], [(1, False)]]
    """
    power = 1 << (world.bit_length() - 1)
    if rank >= power:
        return [(rank - power, False)]
    steps = [(rank + power, True)] if rank + power < world else []
    distance = 1
    while distance < power:
        if rank & distance:
            return [*steps, (rank - distance, False)]
        steps.append((rank + distance, True))
        distance *= 2
    return steps
