"""The residual and the gradient of one bucket in one step, and how a step is taken back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels import Picked, backend
from ..wire.sparse_vector import SparseVector


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

    def finish_dense(self, mean: Tensor) -> None:
        """Everything went out: the result is `mean` and nothing is left behind."""
        if mean is not self.work:
            self.work.copy_(mean)
        if self.residual is not None:
            self.residual.zero_()

    def roll_back(self) -> None:
        """As if the step had not been: the old residual, and a result of zeros."""
        if self.residual is not None and not self.absorbs:
            self.residual.copy_(self.work)
        self.work.zero_()


def narrowed(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """In a narrower type, never infinite."""
    largest = torch.finfo(dtype).max
    return mean.clamp(-largest, largest).to(dtype)
