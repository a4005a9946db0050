"""Error feedback in one step of a bucket or of fused ones: add the residual, keep what is unsent, or roll back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..kernels import SMALLEST, Picked, backend, bin_edge, bin_of, index_dtype
from ..kernels.pieces import join_picked
from ..kernels.types import edges_of
from ..wire.sparse_vector import SparseVector

_BINS = bin_of(math.inf) + 1


class Accumulator:
    """acc = residual + gradient, computed in the residual's memory by the first pass over it.

    `works` hold the gradient at first. That pass moves the old residual into them, so that rollback() can restore
    the residual to the bit. After write_mean() or write_dense_mean(), `works` hold the result. Without residuals,
    acc is the gradient. Buckets that are fused are one vector in several pieces of memory; nothing is copied.

    Attributes:
        works: Memory of the gradient, then of the result: one tensor for each bucket.
        residuals: The residual of each bucket, updated in place; empty for no error feedback.
        absorbs: The next pass still has to add the gradient.
    """

    def __init__(self, works: Sequence[Tensor], residuals: Sequence[Tensor] = ()) -> None:
        self.works, self.residuals = works, residuals
        self.kernels = backend(works[0])
        self.edges = edges_of(works)
        self.size, self.device = self.edges[-1], works[0].device
        self.absorbs = bool(residuals)

    @property
    def values(self) -> Tensor:
        """acc as one tensor: a copy if there are several pieces."""
        pieces = self.pieces()
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))

    def pieces(self) -> Sequence[Tensor]:
        """acc as the tensors that hold it."""
        if self.absorbs:
            self.select(math.inf, 0)
        return self.residuals or self.works

    # Selection.

    def select(self, threshold: float, capacity: int) -> Picked:
        """Select the entries with |acc| >= threshold. The first call adds the gradient in the same pass."""
        if self.absorbs:
            picked = self.kernels.accumulate_select_pieces(self.residuals, self.works, threshold, capacity)
            self.absorbs = False
            return picked
        found = [self.kernels.select(piece, threshold, capacity) for piece in self.pieces()]
        return found[0] if len(found) == 1 else join_picked(found, self.edges, capacity)

    def vector(self, picked: Picked) -> SparseVector:
        """The selected entries in host memory, where messages are made and sums are taken."""
        return SparseVector(*self.kernels.to_host(picked.indices, picked.values), self.size)

    def at(self, indices: Tensor) -> Tensor:
        """The entries at increasing indices; both in host memory."""
        asked = SparseVector(indices, torch.empty(indices.numel()), self.size)
        parts = zip(self.pieces(), self.split_by_piece(asked), strict=True)
        return torch.cat([piece[part.indices.to(self.device).long()] for piece, part in parts]).cpu()

    def kth_magnitude(self, k: int) -> float:
        """The k-th largest magnitude.

        In several pieces: find its bin by a histogram, then search the entries in or above that bin. The result is
        exact unless it is below the smallest normal number.
        """
        pieces = self.pieces()
        if len(pieces) == 1:
            return self.kernels.kth_magnitude(pieces[0], k)
        histograms = np.array([self.kernels.magnitude_histogram(piece, 0, _BINS) for piece in pieces])
        at_least = np.cumsum(histograms.sum(0)[::-1])[::-1]
        best = int(np.flatnonzero(at_least >= k)[-1])
        if best < bin_of(SMALLEST):  # below the smallest normal number: not worth a second pass
            return bin_edge(best)
        picked = self.select(bin_edge(best), int(at_least[best]))
        return self.kernels.kth_magnitude(picked.values, k)

    def first_equal(self, magnitude: float, limit: int) -> Tensor:
        """Indices of the first `limit` entries whose magnitude is exactly `magnitude`."""
        found = []
        for piece, edge in zip(self.pieces(), self.edges, strict=False):
            found.append(self.kernels.first_equal(piece, magnitude, limit).to(index_dtype(self.size)) + edge)
            limit -= found[-1].numel()
        return torch.cat(found)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of |acc|. Over pieces, the means of |acc| and of its square add up."""
        found = [(piece.numel() / self.size, *self.kernels.magnitude_moments(piece)) for piece in self.pieces()]
        if len(found) == 1:
            return found[0][1:]
        mean = sum(share * one for share, one, _ in found)
        square = sum(share * (deviation**2 + one**2) for share, one, deviation in found)
        return mean, max(0.0, square - mean * mean) ** 0.5

    # The end of a step.

    def split_by_piece(self, vector: SparseVector) -> list[SparseVector]:
        """Split a vector of this size into one part for each piece of memory."""
        if len(self.works) == 1:
            return [vector]
        return [
            SparseVector((part.indices - edge).to(index_dtype(work.numel())), part.values, work.numel())
            for part, edge, work in zip(vector.split(self.edges), self.edges, self.works, strict=False)
        ]

    def release(self, leaving: Iterable[SparseVector]) -> None:
        """Subtract from the residual what this rank has sent."""
        if self.residuals:
            for part in leaving:
                self.kernels.scatter_add_pieces_(self.residuals, part.indices, part.values, -1.0, counted=False)

    def write_mean(self, parts: Iterable[SparseVector], world: int) -> int:
        """Write the sum of the parts, divided by `world`, to `works`. Returns the number of non-zeros."""
        first, *rest = list(parts) or [SparseVector.empty(self.size)]
        exact = world & (world - 1) == 0  # multiplying by 1 / world then gives the same bits, and is faster

        def share(part: SparseVector) -> tuple[Tensor, Tensor, float]:
            return (part.indices, part.values, 1 / world) if exact else (part.indices, part.values / world, 1.0)

        found = self.kernels.assign_pieces_(self.works, *share(first))
        return found + sum(self.kernels.scatter_add_pieces_(self.works, *share(part)) for part in rest)

    def write_dense_mean(self, mean: Tensor) -> None:
        """Write the mean of a dense all-reduce to `works` and clear the residuals: everything was sent."""
        if mean is not self.works[0]:
            for work, (start, stop) in zip(self.works, pairwise(self.edges), strict=True):
                work.copy_(mean[start:stop])
        for residual in self.residuals:
            residual.zero_()

    def rollback(self) -> None:
        """Undo the step: restore the residuals and write zeros to `works`."""
        if not self.absorbs:
            for residual, work in zip(self.residuals, self.works, strict=False):
                residual.copy_(work)
        for work in self.works:
            work.zero_()


def narrow(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a narrower dtype. Values beyond its range saturate and never become infinite."""
    largest = torch.finfo(dtype).max
    return mean.clamp(-largest, largest).to(dtype)
