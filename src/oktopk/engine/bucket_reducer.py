"""Buckets in one step: reduced dense or sparse, then handed out, or put back if the step is lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms import Dense
from ..algorithms.base import reduce_step
from ..algorithms.selection import target_count
from ..comm import Metered
from ..feedback.accumulator import Accumulator, fuse, narrowed
from ..feedback.buckets import Bucket
from ..feedback.momentum import MomentumStore
from ..feedback.residuals import ResidualStore
from ..kernels import backend
from ..metrics.events import DENSE, SPARSE, ReductionEvent, Volume
from ..wire.message import VALUE_CODES
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import all_finite
from .bucket_state import BucketResult, BucketState, SentEntries, dense_settled
from .recorder import ReductionRecorder, lateness
from .settings import Settings

_log = logging.getLogger(__name__)

_SMALL = 1 << 20
_NORM_EVERY = 16
"""The norm of a residual is another pass over memory: large ones are measured on some steps only."""

Inspect = Callable[[Accumulator], None]


@dataclass
class _Member:
    """A bucket while it is reduced sparse."""

    lane: BucketState
    grad: Tensor
    work: Tensor
    residual: Tensor
    scale: float | None
    velocity: Tensor | None = None
    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    """What the residual had where parameters always go dense."""
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    """The mean of those over ranks."""


class BucketReducer:
    """Everything that is done to one bucket. Residuals and velocities of all buckets live here."""

    def __init__(self, settings: Settings, meter: Metered, unused_stay: bool = False) -> None:
        self.settings, self.meter = settings, meter
        self.unused_stay = unused_stay
        self.residuals = ResidualStore()
        self.velocities = MomentumStore(settings.momentum)
        self.blocked = 0.0

    def dense(
        self, lane: BucketState, grad: Tensor, scale: float | None, step: int, inspect: Inspect
    ) -> tuple[BucketResult, ReductionEvent]:
        account = ReductionRecorder(self.meter, step, lane.index, lane.bucket.size)
        work, residual = self.dense_work(lane, grad, scale)
        acc = Accumulator(work, residual)
        channel = SparseCommunicator(self.meter, lane.bucket.size, stopwatch=account.watch)
        with self.set_aside(lane.bucket, work, residual) as idle:
            velocity = self.velocities.next(lane.bucket, work, idle)
            reduction, _ = reduce_step(Dense(), channel, acc, lane.bucket.size, None, inspect)
        if not reduction.skipped:
            self.velocities.keep(lane.bucket, velocity, ())  # nothing was held back, so there is nothing to mask
        self.blocked = account.exchange
        event = account.close(
            DENSE, "dense", Volume(lane.bucket.size, lane.bucket.size, grad.nbytes),
            local_count=lane.bucket.size,
            residual_norm=self.measure(lane, residual, step),
        )  # fmt: skip
        return dense_settled(lane, grad, acc, scale, reduction.skipped, bool(idle)), event

    def dense_work(self, lane: BucketState, grad: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """Memory for a dense result, the gradient's own if possible, and the residual that must go out with it."""
        residual = self.residuals.peek(lane.bucket, grad.device)  # of sparse steps, or of lost ones
        plain = residual is None and scale is None and not self.settings.momentum
        return grad if plain else _unscaled(grad, scale), residual

    def sparse(
        self, lanes: Sequence[BucketState], grads: Sequence[Tensor], scale: float | None, density: float, step: int,
        inspect: Inspect,
    ) -> tuple[list[BucketResult], ReductionEvent]:  # fmt: skip
        """Several buckets share their messages: the algorithm sees them as one, with one k and one threshold."""
        size, entries = sum(lane.bucket.size for lane in lanes), sum(lane.free for lane in lanes)
        account = ReductionRecorder(self.meter, step, lanes[0].index, size)
        members = [self._member(lane, grad, scale) for lane, grad in zip(lanes, grads, strict=True)]
        acc = fuse([Accumulator(member.work, member.residual) for member in members])
        channel = SparseCommunicator(
            self.meter, size, step=step, bucket=lanes[0].index, values=VALUE_CODES[self.settings.values],
            device=acc.device, stopwatch=account.watch, blocked_before=self.blocked,
        )  # fmt: skip
        k, known = target_count(entries, density), self._tracking(lanes[0], size)
        with self._prepared(members):
            reduction, found = reduce_step(self.settings.algorithm, channel, acc, k, known, inspect)
            if reduction.skipped:
                _put_kept(members)
        lanes[0].tracking = reduction.state
        self.blocked = account.exchange
        settled = [
            self._settle(member, SentEntries(acc, place, reduction.leaving), reduction.skipped)
            for place, member in enumerate(members)
        ]
        if self.settings.ranks_per_host > 1 and reduction.mean is None:
            parts = [acc.cut(part) for part in reduction.parts]
            settled = [
                replace(one, places=[one.lane.always_dense, *(part[place].indices for part in parts)])
                for place, one in enumerate(settled)
            ]
        if not reduction.skipped:
            self._check_band(lanes[0], reduction.local_count, k, entries, step)
        event = account.close(
            SPARSE, self.settings.algorithm.name,
            Volume.of(entries, found) + Volume.of(size - entries, None),
            lateness(channel, account.exchange),
            target_count=k + size - entries,
            local_count=reduction.local_count + size - entries,
            threshold=reduction.threshold,
            global_threshold=reduction.global_threshold,
            exact=reduction.exact,
            residual_norm=math.hypot(*(self.measure(m.lane, m.residual, step) for m in members)),
        )  # fmt: skip
        return settled, event

    def _member(self, lane: BucketState, grad: Tensor, scale: float | None) -> _Member:
        work = _unscaled(grad, scale)
        return _Member(lane, grad, work, self.residuals.flat(lane.bucket, work.device), scale)

    @contextmanager
    def _prepared(self, members: Sequence[_Member]) -> Iterator[None]:
        """What comes before the algorithm sees a bucket, and what is undone afterwards."""
        with ExitStack() as stack, self._restored(members):
            for member in members:
                idle = stack.enter_context(self.set_aside(member.lane.bucket, member.work, member.residual))
                member.velocity = self.velocities.next(member.lane.bucket, member.work, idle)
                self._reduce_excluded(member)
            yield

    @contextmanager
    def _restored(self, members: Sequence[_Member]) -> Iterator[None]:
        """After an error residuals have again what they had of the entries that always go dense."""
        try:
            yield
        except BaseException:
            _put_kept(members)
            raise

    def _tracking(self, lane: BucketState, size: int) -> Any:
        """What the algorithm remembers, unless it was of another size: buckets may be joined differently now."""
        known = lane.tracking
        return None if known is None or self.settings.algorithm.state_problem(known, size) else known

    def _settle(self, member: _Member, left: SentEntries, skipped: bool) -> BucketResult:
        lane, masked = member.lane, None
        if skipped:
            return BucketResult(lane, member.grad, member.work, member.scale)
        if lane.always_dense.numel():
            member.work[lane.always_dense] = member.mean
        if member.velocity is not None:
            masked = self.velocities.keep(lane.bucket, member.velocity, left.vectors())
        return BucketResult(lane, member.grad, member.work, member.scale, left, lane.always_dense, masked)

    def untouched(
        self, lane: BucketState, grad: Tensor, scale: float | None, phase: str, step: int
    ) -> tuple[BucketResult, ReductionEvent]:
        """A bucket that comes after the one that was not finite: nothing is sent and nothing changes."""
        name = "dense" if phase == DENSE else self.settings.algorithm.name
        account = ReductionRecorder(self.meter, step, lane.index, lane.bucket.size)
        volume = Volume.of(lane.bucket.size, None if phase == DENSE else 0)
        event = account.close(phase, name, volume, residual_norm=lane.residual_norm)
        return BucketResult(lane, grad, grad, scale), event

    @contextmanager
    def set_aside(self, bucket: Bucket, grad: Tensor, residual: Tensor | None) -> Iterator[list[slice]]:
        """Keep back the residuals of parameters that got no gradient here, and tell where those are.

        DDP drops the result of a parameter that no rank has used. If each rank that has not used it sends nothing,
        nothing is dropped.
        """
        if residual is None or not self.unused_stay:
            yield []
            return
        idle = idle_places(bucket, grad)
        kept = [residual[place].clone() for place in idle]
        for place in idle:
            residual[place].zero_()
        try:
            yield idle
        finally:
            for place, mine in zip(idle, kept, strict=True):
                residual[place].add_(mine)  # a merge elsewhere may have given something back here

    def _reduce_excluded(self, member: _Member) -> None:
        """Reduce the always dense entries, and clear them so that no selection finds them.

        A mean that is not finite is so on all ranks: it stays in `work`, where each of them will find it.
        """
        entries, work, residual = member.lane.always_dense, member.work, member.residual
        if not entries.numel():
            return
        kept = member.kept = residual[entries]
        mean = member.mean = (work[entries] + kept).mul_(1.0 / self.meter.world)
        if self.meter.world > 1:
            self.meter.all_reduce_(mean, "always dense")
        residual[entries] = 0.0
        work[entries] = torch.where(mean.isfinite(), 0.0, mean)

    # The end of the step.

    def commit(self, settled: BucketResult) -> None:
        """Finish the result and put it into the caller's memory."""
        work, grad = settled.work, settled.grad
        if settled.emptied:
            self.residuals.drop(settled.lane.bucket)
        if work is grad:
            return
        if settled.scale is not None:
            work.mul_(settled.scale)
        if grad.dtype.itemsize >= work.dtype.itemsize:
            grad.copy_(work)
            return
        grad.copy_(narrowed(work, grad.dtype))
        residual = self.residuals.peek(settled.lane.bucket, work.device)
        if residual is not None and self.meter.rank == 0:  # what the type cannot hold stays with rank 0
            residual.add_((work - grad).div_(settled.scale or 1.0), alpha=self.meter.world)

    def rollback(self, settled: BucketResult, overwritten: bool = False) -> None:
        """As if the bucket had sent nothing: its gradient stays in the residual, and the result is empty.

        If its memory is `overwritten`, dense entries are lost, and it is left as it is.
        """
        bucket, entries = settled.lane.bucket, None if overwritten else settled.dense_entries
        if settled.left is not None or entries is not None:
            residual = self.residuals.flat(bucket, settled.work.device)
            for part in settled.left.vectors() if settled.left is not None else ():
                backend(residual).scatter_add_(residual, part.indices, part.values)
            if entries is not None:  # each rank takes its share of the sum, so that no mass is lost
                residual[entries] += settled.work[entries].float()
        if settled.masked is not None:
            masked, values = settled.masked
            self.velocities.flat(bucket)[masked] = values
        if overwritten:
            return
        # A GradScaler must see that something was wrong; everybody else gets nothing to apply.
        settled.grad.fill_(0.0 if settled.scale is None else math.nan)

    def keep(self, lane: BucketState, grad: Tensor, scale: float | None) -> None:
        """The gradient of a bucket that was not reduced stays in the residual, if it is finite."""
        work = _unscaled(grad, scale)
        if all_finite(work):
            self.velocities.keep(lane.bucket, self.velocities.next(lane.bucket, work, ()), ())
            self.residuals.flat(lane.bucket, work.device).add_(work)
        grad.fill_(0.0 if scale is None else math.nan)

    # What to tell.

    def measure(self, lane: BucketState, residual: Tensor | None, step: int) -> float:
        """The norm of a residual, as it is or as it was when last looked at; 0 if there is none."""
        if residual is None:
            return 0.0
        if lane.bucket.size <= _SMALL or step % _NORM_EVERY == 0:
            lane.residual_norm = float(torch.linalg.vector_norm(residual))
        return lane.residual_norm

    def _check_band(self, lane: BucketState, count: int, k: int, entries: int, step: int) -> None:
        low, high = self.settings.algorithm.band
        if low * k <= count <= high * k or lane.warned:
            return
        lane.warned = True
        _log.warning(
            "step %d: rank %d sent %.3g %% of bucket %d where %.3g %% was asked for%s",
            step, self.meter.rank, 100 * count / entries, lane.index, 100 * k / entries,
            " (fewer entries are not zero)" if count < k else "",
        )  # fmt: skip


def idle_places(bucket: Bucket, grad: Tensor) -> list[slice]:
    """Where the parameters lie whose gradient is all zeros. Few start with a zero, so few are looked at whole."""
    first = grad.index_select(0, bucket.starts.to(grad.device))
    if first.all():
        return []
    suspects = [bucket.filled[index] for index in (first == 0).nonzero().flatten().tolist()]
    return [place for place in suspects if not bool(grad[place].any())]


def _put_kept(members: Sequence[_Member]) -> None:
    """Residuals have again what they had of the entries that always go dense."""
    for member in members:
        if member.kept.numel():
            member.residual[member.lane.always_dense] = member.kept


def _unscaled(grad: Tensor, scale: float | None) -> Tensor:
    """The gradient in float32 and in its own units, in memory that may be written to."""
    if scale is None:
        return grad.to(torch.float32)
    return grad.to(torch.float32, copy=True).mul_(1.0 / scale)
