"""Several buckets as one vector: small messages cost as much as large ones, so buckets share theirs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..kernels import SMALLEST, Picked, bin_edge, bin_of, index_dtype
from ..kernels.pieces import join_picked
from ..wire.sparse_vector import SparseVector
from .accumulator import Accumulator

_BINS = bin_of(math.inf) + 1


def joined(members: Sequence[Accumulator]) -> Accumulator:
    """One accumulator out of several."""
    return members[0] if len(members) == 1 else Joined(members)


class Joined(Accumulator):
    """Accumulators end to end. Algorithms see one vector; its memory stays where it is."""

    def __init__(self, members: Sequence[Accumulator]) -> None:
        self.members = members
        self.kernels = members[0].kernels
        self.edges = [0, *accumulate(member.size for member in members)]
        self._works = [member.work for member in members]

    @property
    def size(self) -> int:
        return self.edges[-1]

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    @property
    def values(self) -> Tensor:
        """A copy: algorithms that can do without ask for the pieces."""
        return torch.cat(self.pieces())

    def pieces(self) -> list[Tensor]:
        return [member.values for member in self.members]

    def select(self, threshold: float, capacity: int) -> Picked:
        residuals = [m.residual for m in self.members if m.absorbs and m.residual is not None]
        if not residuals:
            return join_picked(
                [member.select(threshold, capacity) for member in self.members], self.edges, capacity
            )
        picked = self.kernels.accumulate_select_pieces(residuals, self._works, threshold, capacity)
        for member in self.members:
            member.absorbs = False
        return picked

    def at(self, indices: Tensor) -> Tensor:
        asked = SparseVector(indices, torch.empty(indices.numel(), device=indices.device), self.size)
        parts = zip(self.members, self.cut(asked), strict=True)
        return torch.cat([member.at(part.indices) for member, part in parts])

    def kth_magnitude(self, k: int) -> float:
        """From a histogram of all magnitudes: what lies in or above the bin of the k-th is looked at once more.

        Exact unless it is below the smallest normal number.
        """
        histograms = np.array([self.kernels.magnitude_histogram(piece, 0, _BINS) for piece in self.pieces()])
        at_least = np.cumsum(histograms.sum(0)[::-1])[::-1]
        best = int(np.flatnonzero(at_least >= k)[-1])
        if best < bin_of(SMALLEST):  # next to nothing: no need to look at all of it again
            return bin_edge(best)
        picked = self.select(bin_edge(best), int(at_least[best]))
        return self.kernels.kth_magnitude(picked.values, k)

    def first_equal(self, magnitude: float, limit: int) -> Tensor:
        found = []
        for member, edge in zip(self.members, self.edges, strict=False):
            found.append(member.first_equal(magnitude, limit).to(index_dtype(self.size)) + edge)
            limit -= found[-1].numel()
        return torch.cat(found)

    def moments(self) -> tuple[float, float]:
        """Of the whole, from those of its members: means of |acc| and of its square add up."""
        found = [(member.size / self.size, *member.moments()) for member in self.members]
        mean = sum(share * one for share, one, _ in found)
        square = sum(share * (deviation**2 + one**2) for share, one, deviation in found)
        return mean, max(0.0, square - mean * mean) ** 0.5

    def cut(self, vector: SparseVector) -> list[SparseVector]:
        parts = vector.split(self.edges)
        return [
            SparseVector((part.indices - edge).to(index_dtype(member.size)), part.values, member.size)
            for part, edge, member in zip(parts, self.edges, self.members, strict=False)
        ]

    def release(self, leaving: Iterable[SparseVector]) -> None:
        residuals = [member.residual for member in self.members if member.residual is not None]
        if residuals:
            for part in leaving:
                self.kernels.scatter_add_pieces_(residuals, part.indices, part.values, -1.0)

    def finish(self, parts: Iterable[SparseVector], world: int) -> int:
        return self._finish(self._works, parts, world)

    def finish_dense(self, mean: Tensor) -> None:
        for member, (start, stop) in zip(self.members, pairwise(self.edges), strict=True):
            member.finish_dense(mean[start:stop])

    def roll_back(self) -> None:
        for member in self.members:
            member.roll_back()
