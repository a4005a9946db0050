"""Momentum correction: each rank accumulates its own velocity instead of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..wire.sparse_vector import SparseVector
from .buckets import Bucket
from .residuals import ResidualStore


class MomentumStore(ResidualStore):
    """The velocity of every bucket.

    Args:
        momentum: Decay of the velocity per step; 0 turns momentum correction off, and nothing is stored.
    """

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def advance(self, bucket: Bucket, work: Tensor, idle: Sequence[slice]) -> Tensor | None:
        """Compute the velocity after this step and write it to `work`; commit() stores it.

        In the `idle` slices (parameters without a gradient) the velocity does not change and `work` is zero.
        """
        if not self.momentum:
            return None
        last = self.flat(bucket, work.device)
        velocity = last.mul(self.momentum).add_(work)
        work.copy_(velocity)
        for place in idle:
            velocity[place] = last[place]
            work[place] = 0.0
        return velocity

    def commit(
        self, bucket: Bucket, velocity: Tensor | None, leaving: Sequence[SparseVector]
    ) -> tuple[Tensor, Tensor] | None:
        """Store the velocity, zero where an entry was sent (factor masking).

        Returns the masked indices and their velocities, so that a rollback can restore them.
        """
        if velocity is None:
            return None
        kept = self.flat(bucket)
        kept.copy_(velocity)
        left = leaving[0].indices.to(kept.device).long() if leaving else torch.empty(0, dtype=torch.int64)
        masked = left, kept[left]
        kept[left] = 0.0
        return masked
