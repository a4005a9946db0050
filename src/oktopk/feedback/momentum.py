"""Momentum correction: what is accumulated is not the gradient but a velocity of this rank's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..wire.sparse_vector import SparseVector
from .buckets import Bucket
from .residuals import ResidualStore


class MomentumStore(ResidualStore):
    """The velocity of every bucket; none if there is no momentum."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def next(self, bucket: Bucket, work: Tensor, idle: Sequence[slice]) -> Tensor | None:
        """The velocity after this step, which `work` holds then; it is kept only if the step is not lost."""
        if not self.momentum:
            return None
        last = self.flat(bucket, work.device)
        velocity = last.mul(self.momentum).add_(work)
        work.copy_(velocity)
        for place in idle:
            velocity[place] = last[place]
            work[place] = 0.0
        return velocity

    def keep(
        self, bucket: Bucket, velocity: Tensor | None, leaving: Sequence[SparseVector]
    ) -> tuple[Tensor, Tensor] | None:
        """Factor masking: the velocity of an entry that has left starts anew. Returns where, and what it was."""
        if velocity is None:
            return None
        kept = self.flat(bucket)
        kept.copy_(velocity)
        left = leaving[0].indices.long() if leaving else torch.empty(0, dtype=torch.int64)
        masked = left, kept[left]
        kept[left] = 0.0
        return masked
