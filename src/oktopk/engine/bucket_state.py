"""A bucket from step to step, and what one step has come to for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..feedback.accumulator import Accumulator
from ..feedback.buckets import Bucket
from ..wire.sparse_vector import SparseVector, all_finite
from .choice import Choice


@dataclass
class BucketState:
    """What one bucket has: its place in the order, what its algorithm remembers, and the better way to go."""

    bucket: Bucket
    index: int
    always_dense: Tensor
    """Entries of parameters that never go sparse."""
    tracking: Any = None
    choice: Choice = field(default_factory=Choice)
    residual_norm: float = 0.0
    warned: bool = False

    @property
    def free(self) -> int:
        """Entries that may go sparse."""
        return self.bucket.size - self.always_dense.numel()

    @property
    def never_sparse(self) -> bool:
        return self.free == 0


def not_finite(lane: BucketState, values: Tensor) -> list[str]:
    """The parameters that hold a NaN or an infinity."""
    return [name for name, place in lane.bucket.places.items() if not all_finite(values[place])]


@dataclass(frozen=True)
class SentEntries:
    """What has left the residual of one of the buckets that were reduced together."""

    acc: Accumulator
    place: int
    leaving: Sequence[SparseVector]

    def vectors(self) -> list[SparseVector]:
        return [self.acc.cut(vector)[self.place] for vector in self.leaving]


@dataclass(frozen=True)
class BucketResult:
    """A bucket that has been reduced in this step, and how to take that back."""

    lane: BucketState
    grad: Tensor
    """The caller's memory, where the result goes."""
    work: Tensor
    """The result; float32, or the same memory."""
    scale: float | None
    left: SentEntries | None = None
    dense_entries: Tensor | slice | None = None
    """Entries that went dense; their mean is in `work`."""
    masked: tuple[Tensor, Tensor] | None = None
    """Entries of the velocity that were cleared, and what they were."""
    emptied: bool = False
    """All that its residual had has gone out."""
    places: Sequence[Tensor] | None = None
    """Indices of all entries of the result that are not zero; None if that is not known."""


def dense_settled(
    lane: BucketState, grad: Tensor, acc: Accumulator, scale: float | None, skipped: bool, idle: bool
) -> BucketResult:
    """What a dense reduction has come to; `idle` says that some of the residual was set aside."""
    # Only float32 is sent alike with a residual and without one, so that ranks need not agree on this.
    emptied = not (skipped or idle or acc.residual is None) and grad.dtype == torch.float32
    entries = None if skipped else slice(None)
    return BucketResult(lane, grad, acc.work, scale, dense_entries=entries, emptied=emptied)
