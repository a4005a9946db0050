"""The residual and the gradient of one bucket in one step, and how a step is taken back."""

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
    """acc = residual + gradient, formed in the residual's memory by the first pass that looks at it.

    Until the step is agreed on, `work` (which came in as the gradient) keeps the old residual, so that a step
    can be taken back to the bit; afterwards it holds the result. Without a residual, acc is the gradient.
    """

    def __init__(self, work: Tensor, residual: Tensor | None) -> None:
        self.work = work
        self.residual = residual
        self.kernels = backend(work)
        self.absorbs = residual is not None
        """The next pass has to add the gradient."""

    @property
    def size(self) -> int:
        return self.work.numel()

    @property
    def device(self) -> torch.device:
        return self.work.device

    @property
    def values(self) -> Tensor:
        """acc itself, after the first pass."""
        if self.absorbs:
            self.select(math.inf, 0)
        return self.work if self.residual is None else self.residual

    def pieces(self) -> list[Tensor]:
        """acc as it lies in memory."""
        return [self.values]

    # What selections ask.

    def select(self, threshold: float, capacity: int) -> Picked:
        """Entries with |acc| >= threshold. The first call adds the gradient in the same pass over memory."""
        if self.residual is None or not self.absorbs:
            return self.kernels.select(self.values, threshold, capacity)
        picked = self.kernels.accumulate_select_pieces([self.residual], [self.work], threshold, capacity)
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

    def cut(self, vector: SparseVector) -> list[SparseVector]:
        """A vector of this size, by the pieces of memory it belongs to."""
        return [vector]

    def release(self, leaving: Iterable[SparseVector]) -> None:
        """Take from the residual what has left this rank."""
        if self.residual is not None:
            for part in leaving:
                self.kernels.scatter_add_pieces_([self.residual], part.indices, part.values, -1.0)

    def finish(self, parts: Iterable[SparseVector], world: int) -> int:
        """Put the sum of the parts over the number of ranks into `work`; returns the number of non-zeros."""
        return self._finish([self.work], parts, world)

    def _finish(self, works: Sequence[Tensor], parts: Iterable[SparseVector], world: int) -> int:
        first, *rest = list(parts) or [SparseVector.empty(self.size, self.device)]
        exact = world & (world - 1) == 0  # then a product is the same number as the quotient, and costs less

        def share(part: SparseVector) -> tuple[Tensor, Tensor, float]:
            return (part.indices, part.values, 1 / world) if exact else (part.indices, part.values / world, 1.0)

        found = self.kernels.assign_pieces_(works, *share(first))
        return found + sum(self.kernels.scatter_add_pieces_(works, *share(part)) for part in rest)

    def write_dense_mean(self, mean: Tensor) -> None:
        """Everything went out: the result is `mean` and nothing is left behind."""
        if mean is not self.work:
            self.work.copy_(mean)
        if self.residual is not None:
            self.residual.zero_()

    def rollback(self) -> None:
        """As if the step had not been: the old residual, and a result of zeros."""
        if self.residual is not None and not self.absorbs:
            self.residual.copy_(self.work)
        self.work.zero_()


class FusedAccumulator(Accumulator):
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

    def write_dense_mean(self, mean: Tensor) -> None:
        for member, (start, stop) in zip(self.members, pairwise(self.edges), strict=True):
            member.write_dense_mean(mean[start:stop])

    def rollback(self) -> None:
        for member in self.members:
            member.rollback()


def fuse(members: Sequence[Accumulator]) -> Accumulator:
    """One accumulator out of several."""
    return members[0] if len(members) == 1 else FusedAccumulator(members)


def narrowed(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """In a narrower type, never infinite."""
    largest = torch.finfo(dtype).max
    return mean.clamp(-largest, largest).to(dtype)
