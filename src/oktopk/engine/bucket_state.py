"""A bucket from step to step, buckets that are fused, and the result of a bucket in one step."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..feedback.accumulator import Accumulator
from ..feedback.buckets import Bucket
from ..wire.sparse_vector import SparseVector, all_finite


@dataclass(eq=False)
class BucketState:
    """What the engine knows of a bucket: its place in the order, and the entries that are never compressed."""

    bucket: Bucket
    index: int
    always_dense: Tensor
    residual_norm: float = 0.0
    """When it was last measured."""
    compressible: int = field(init=False)
    """Number of entries that may be sent sparsely."""

    def __post_init__(self) -> None:
        self.compressible = self.bucket.size - self.always_dense.numel()

    def nonfinite(self, values: Tensor) -> list[str]:
        """The parameters that hold a NaN or an infinity."""
        return [name for name, place in self.bucket.places.items() if not all_finite(values[place])]


@dataclass(eq=False)
class BucketGroup:
    """Buckets that are fused: to the algorithm they are one vector, with one k and one threshold."""

    members: tuple[BucketState, ...]
    tracking: Any = None
    """What the algorithm remembers of the group."""
    warned: bool = False
    index: int = field(init=False)
    """The group's number in messages and events: that of its first bucket."""
    size: int = field(init=False)
    compressible: int = field(init=False)

    def __post_init__(self) -> None:
        self.index = self.members[0].index
        self.size = sum(state.bucket.size for state in self.members)
        self.compressible = sum(state.compressible for state in self.members)


class BucketTable:
    """The buckets of a model, and the groups that they are fused in, from step to step."""

    def __init__(self) -> None:
        self.states: dict[Bucket, BucketState] = {}
        self.groups: dict[Bucket, BucketGroup] = {}
        """By their first bucket."""

    def add(self, state: BucketState) -> BucketState:
        """Add a bucket, in place of those that had some of its parameters."""
        moved = set(state.bucket.names)
        self.states = {old: other for old, other in self.states.items() if moved.isdisjoint(old.names)}
        self.states[state.bucket] = state
        return state

    def group_of(self, members: Sequence[BucketState]) -> BucketGroup:
        """The group of these buckets, with what the algorithm remembers of it from earlier steps."""
        buckets, group = [state.bucket for state in members], self.groups.get(members[0].bucket)
        if group is None or group.members != tuple(members):
            known = group is not None and [state.bucket for state in group.members] == buckets
            moved = {name for bucket in buckets for name in bucket.names}
            self.groups = {old: other for old, other in self.groups.items() if moved.isdisjoint(old.names)}
            group = BucketGroup(tuple(members), group.tracking if group is not None and known else None)
            self.groups[buckets[0]] = group
        return group

    def keep(self, used: Set[Bucket]) -> None:
        """Forget buckets that a step did not have, because their parameters were frozen."""
        if len(used) < len(self.states):
            self.states = {bucket: state for bucket, state in self.states.items() if bucket in used}
            self.groups = {
                first: group
                for first, group in self.groups.items()
                if all(state.bucket in used for state in group.members)
            }

    def forget_tracking(self) -> None:
        """Let algorithms evaluate their thresholds anew."""
        for group in self.groups.values():
            group.tracking = None


class Handed(NamedTuple):
    """A bucket that was handed in. Its memory gets the result; a GradScaler may have scaled the gradient."""

    state: BucketState
    grad: Tensor
    scale: float | None

    def unscaled(self) -> Tensor:
        """The gradient in float32 and without a GradScaler's scale, in memory that may be overwritten."""
        if self.scale is None:
            return self.grad.to(torch.float32)
        return self.grad.to(torch.float32, copy=True).mul_(1.0 / self.scale)


@dataclass(frozen=True)
class SentEntries:
    """The entries that have left the residual of one bucket of a group."""

    acc: Accumulator
    place: int
    leaving: Sequence[SparseVector]

    def vectors(self) -> list[SparseVector]:
        return [self.acc.split_by_piece(vector)[self.place] for vector in self.leaving]


@dataclass(frozen=True)
class BucketResult:
    """A bucket that has been reduced in this step, with what is needed to commit or to roll back."""

    handed: Handed
    work: Tensor
    """The result; float32, or the caller's memory."""
    sent: SentEntries | None = None
    dense_entries: Tensor | slice | None = None
    """Entries that were averaged densely; their mean is in `work`."""
    masked: tuple[Tensor, Tensor] | None = None
    """Entries of the momentum that were cleared, and what they were."""
    emptied: bool = False
    """The whole residual has been sent."""
    nonzeros: Sequence[Tensor] | None = None
    """Indices of all entries of the result that may differ from zero; None if that is not known."""
