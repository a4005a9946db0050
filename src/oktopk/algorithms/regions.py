"""The regions of Ok-Topk: their edges, what an owner may announce, and how owners even out what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ..comm import Communicator
from ..errors import WireError
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import SparseVector
from .base import equal_regions, rounding_error


def balanced_regions(comm: Communicator, local: SparseVector) -> list[int]:
    """Edges of P regions that split the selections evenly: the mean over ranks of each rank's even split."""
    world, count = comm.world, len(local)
    proposal = torch.tensor(equal_regions(local.size, world)[1:-1], dtype=torch.int64)
    if count >= world:
        cuts = torch.tensor([count * part // world for part in range(1, world)], dtype=torch.int64)
        proposal = local.indices.cpu()[cuts].to(torch.int64)
    proposals = comm.all_gather_ints(proposal.tolist(), "regions")
    for rank, theirs in enumerate(proposals):
        if not is_partition([0, *theirs, local.size], local.size):
            raise WireError(
                f"all_gather (regions): rank {comm.global_rank(rank)} proposed edges that do not rise from 0 to "
                f"{local.size}: {theirs}"
            )
    return [0, *(sum(edges) // world for edges in zip(*proposals, strict=True)), local.size]


def is_partition(edges: Sequence[int], size: int) -> bool:
    """Whether these are edges of regions: integers that rise from 0 to size."""
    return (
        all(type(edge) is int for edge in edges)
        and edges[0] == 0
        and edges[-1] == size
        and all(start <= stop for start, stop in pairwise(edges))
    )


def check_counts(comm: Communicator, reports: Any, edges: Sequence[int], limit: int) -> None:
    """Raise a WireError if a rank has announced sums that its region or its peers cannot have given it.

    Args:
        comm: the ranks.
        reports: a row of counts for each of them, as a 2-D array of integers.
        edges: of their regions.
        limit: entries that a rank has received, at most.
    """
    bounds = np.minimum(np.diff(edges), limit)
    wrong = (reports.min(1) < 0) | (reports.max(1) > bounds) | (reports.sum(1) > bounds)
    if wrong.any():
        rank = int(wrong.argmax())
        raise WireError(
            f"all_gather (counts): rank {comm.global_rank(rank)} announced {reports[rank].sum()} sums, at most "
            f"{bounds[rank]} are possible"
        )


def balance(
    comm: SparseCommunicator, own: SparseVector, sizes: Sequence[int], edges: Sequence[int]
) -> tuple[SparseVector, list[SparseVector], list[int]]:
    """Even out the buffers: block j of the concatenated entries, all of about equal length, goes to rank j.

    Returns this rank's block, the rounding errors that stay in its residual, and the length of every block.
    """
    line = [0, *accumulate(sizes)]
    blocks = equal_regions(line[-1], comm.world)
    start, rank = line[comm.rank], comm.rank
    outgoing = [own[slice(*overlap(line, rank, blocks, peer, start))] for peer in range(comm.world)]
    counts = [stop - begin for begin, stop in (overlap(line, r, blocks, rank) for r in range(comm.world))]
    sent, block = comm.rearrange(outgoing, counts, edges, blocks[1] - blocks[0])
    lost = rounding_error(own, SparseVector.join(sent)) if len(own) else []
    return block, lost, [stop - begin for begin, stop in pairwise(blocks)]


def overlap(
    line: Sequence[int], owner: int, blocks: Sequence[int], block: int, origin: int = 0
) -> tuple[int, int]:
    """The part of an owner's interval that lies in a block, counted from origin; (x, x) if they do not overlap."""
    start = max(line[owner], blocks[block])
    stop = max(start, min(line[owner + 1], blocks[block + 1]))
    return start - origin, stop - origin
