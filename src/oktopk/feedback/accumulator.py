"""Error feedback in one step of one bucket: add the residual, keep what is not sent, commit or roll back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..kernels import SMALLEST, Picked, backend, bin_edge, bin_of, index_dtype
from ..kernels.pieces import join_picked
from ..wire.sparse_vector import SparseVector

_BINS = bin_of(math.inf) + 1


class Accumulator:
    """acc = residual + gradient, computed in the residual's memory by the first pass over it.

    `work` holds the gradient at first. That pass moves the old residual into it, so that rollback() can restore
    the residual to the bit. After write_mean() or write_dense_mean(), `work` holds the result. Without a residual,
    acc is the gradient.

    Attributes:
        work: Memory of the gradient, then of the result.
        residual: The residual of the bucket, updated in place; None for no error feedback.
        absorbs: The next pass still has to add the gradient.
    """

    def __init__(self, work: Tensor, residual: Tensor | None) -> None:
        self.work = work
        self.residual = residual
        self.kernels = backend(work)
        self._works = [work]
        self._residuals = [] if residual is None else [residual]
        self.absorbs = residual is not None

    @property
    def size(self) -> int:
        return self.work.numel()

    @property
    def device(self) -> torch.device:
        return self.work.device

    @property
    def values(self) -> Tensor:
        """acc as one tensor."""
        if self.absorbs:
            self.select(math.inf, 0)
        return self.work if self.residual is None else self.residual

    def pieces(self) -> list[Tensor]:
        """acc as the tensors that hold it."""
        return [self.values]

    # Selection.

    def select(self, threshold: float, capacity: int) -> Picked:
        """Select the entries with |acc| >= threshold. The first call adds the gradient in the same pass."""
        if self.residual is None or not self.absorbs:
            return self.kernels.select(self.values, threshold, capacity)
        picked = self.kernels.accumulate_select_pieces(self._residuals, self._works, threshold, capacity)
        self.absorbs = False
        return picked

    def vector(self, picked: Picked) -> SparseVector:
        return SparseVector(picked.indices, picked.values, self.size)

    def at(self, indices: Tensor) -> Tensor:
        """The entries at increasing indices."""
        return self.values[indices.long()]

    def kth_magnitude(self, k: int) -> float:
        return self.kernels.kth_magnitude(self.values, k)

    def first_equal(self, magnitude: float, limit: int) -> Tensor:
        return self.kernels.first_equal(self.values, magnitude, limit)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of |acc|."""
        return self.kernels.magnitude_moments(self.values)

    # The end of a step.

    def split_by_piece(self, vector: SparseVector) -> list[SparseVector]:
        """Split a vector of this size into one part for each piece of memory."""
        return [vector]

    def release(self, leaving: Iterable[SparseVector]) -> None:
        """Subtract from the residual what this rank has sent."""
        if self._residuals:
            for part in leaving:
                self.kernels.scatter_add_pieces_(self._residuals, part.indices, part.values, -1.0)

    def write_mean(self, parts: Iterable[SparseVector], world: int) -> int:
        """Write the sum of the parts, divided by `world`, to `work`. Returns the number of non-zeros."""
        first, *rest = list(parts) or [SparseVector.empty(self.size, self.device)]
        exact = world & (world - 1) == 0  # multiplying by 1 / world then gives the same bits, and is faster

        def share(part: SparseVector) -> tuple[Tensor, Tensor, float]:
            return (part.indices, part.values, 1 / world) if exact else (part.indices, part.values / world, 1.0)

        found = self.kernels.assign_pieces_(self._works, *share(first))
        return found + sum(self.kernels.scatter_add_pieces_(self._works, *share(part)) for part in rest)

    def write_dense_mean(self, mean: Tensor) -> None:
        """Write the mean of a dense all-reduce to `work` and clear the residual: everything was sent."""
        if mean is not self.work:
            self.work.copy_(mean)
        if self.residual is not None:
            self.residual.zero_()

    def rollback(self) -> None:
        """Undo the step: restore the residual and write zeros to `work`."""
        if self.residual is not None and not self.absorbs:
            self.residual.copy_(self.work)
        self.work.zero_()


class FusedAccumulator(Accumulator):
    """Several buckets as one vector. Each bucket keeps its own memory; nothing is copied."""

    def __init__(self, members: Sequence[Accumulator]) -> None:
        self.members = members
        self.kernels = members[0].kernels
        self.edges = [0, *accumulate(member.size for member in members)]
        self._works = [member.work for member in members]
        self._residuals = [member.residual for member in members if member.residual is not None]

    @property
    def size(self) -> int:
        return self.edges[-1]

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    @property
    def values(self) -> Tensor:
        """A copy; pieces() gives acc without one."""
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
        parts = zip(self.members, self.split_by_piece(asked), strict=True)
        return torch.cat([member.at(part.indices) for member, part in parts])

    def kth_magnitude(self, k: int) -> float:
        """Find the bin of the k-th largest magnitude by a histogram, then search the entries in or above that bin.

        The result is exact unless it is below the smallest normal number.
        """
        histograms = np.array([self.kernels.magnitude_histogram(piece, 0, _BINS) for piece in self.pieces()])
        at_least = np.cumsum(histograms.sum(0)[::-1])[::-1]
        best = int(np.flatnonzero(at_least >= k)[-1])
        if best < bin_of(SMALLEST):  # below the smallest normal number: not worth a second pass
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
        """Combine the members' moments: the means of |acc| and of its square add up."""
        found = [(member.size / self.size, *member.moments()) for member in self.members]
        mean = sum(share * one for share, one, _ in found)
        square = sum(share * (deviation**2 + one**2) for share, one, deviation in found)
        return mean, max(0.0, square - mean * mean) ** 0.5

    def split_by_piece(self, vector: SparseVector) -> list[SparseVector]:
        parts = vector.split(self.edges)
        return [
            SparseVector((part.indices - edge).to(index_dtype(member.size)), part.values, member.size)
            for part, edge, member in zip(parts, self.edges, self.members, strict=False)
        ]

    def write_dense_mean(self, mean: Tensor) -> None:
        for member, (start, stop) in zip(self.members, pairwise(self.edges), strict=True):
            member.write_dense_mean(mean[start:stop])

    def rollback(self) -> None:
        for member in self.members:
            member.rollback()


def fuse(members: Sequence[Accumulator]) -> Accumulator:
    """Present several accumulators as one."""
    return members[0] if len(members) == 1 else FusedAccumulator(members)


def narrow(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a narrower dtype. Values beyond its range saturate and never become infinite."""
    largest = torch.finfo(dtype).max
    return mean.clamp(-largest, largest).to(dtype)
