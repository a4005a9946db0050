"""Buckets in one step: reduced sparsely, then committed, or rolled back if the step is lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..algorithms.base import Reduction, digest_of, reduce_step
from ..algorithms.selection import target_count
from ..comm import Digest, Metered
from ..feedback.accumulator import Accumulator, narrow
from ..feedback.buckets import Bucket
from ..feedback.momentum import MomentumStore
from ..feedback.residuals import ResidualStore
from ..kernels import backend
from ..metrics.events import DENSE, SPARSE, ReductionEvent, Volume
from ..utils.streams import streams_of
from ..wire.codecs import find_values
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import all_finite
from .bucket_state import BucketGroup, BucketResult, BucketState, Handed, SentEntries
from .nonfinite import NonFiniteReport
from .recorder import ReductionRecorder
from .settings import Settings

_log = logging.getLogger(__name__)

_SMALL = 1 << 20
_NORM_EVERY = 16
"""The norm of a residual is another pass over memory: large ones are measured every so many steps only."""


@dataclass
class _Member:
    """A bucket while its group is reduced."""

    handed: Handed
    work: Tensor
    residual: Tensor
    velocity: Tensor | None = None
    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    """What the residual had where entries are always dense."""
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    """The mean of those entries over ranks."""


class BucketReducer:
    """Everything that is done to a bucket. Residuals and velocities of all buckets live here.

    Args:
        settings: how to reduce.
        meter: the ranks that exchange with each other.
        unused_stay: whether residuals of parameters without a gradient are kept back, as DDP needs it.
    """

    def __init__(self, settings: Settings, meter: Metered, unused_stay: bool = False) -> None:
        self.settings, self.meter = settings, meter
        self.unused_stay = unused_stay
        self._values = find_values(settings.values)
        self.residuals = ResidualStore()
        self.velocities = MomentumStore(settings.momentum)
        self.blocked = 0.0
        """How long this rank was blocked by others in its last reduction."""

    @property
    def stores(self) -> tuple[ResidualStore, ...]:
        """What outlasts a step, in the units of gradients."""
        return self.residuals, self.velocities

    def dense_work(self, handed: Handed) -> tuple[Tensor, Tensor | None]:
        """Memory for a dense result, the gradient's own if possible, and the residual to be sent with it."""
        residual = self.residuals.get(
            handed.state.bucket, handed.grad.device
        )  # of sparse steps, or of skipped ones
        if residual is not None:
            streams_of(residual).keep(residual)  # the side stream made it
        plain = residual is None and handed.scale is None and not self.settings.momentum
        return handed.grad if plain else handed.unscaled(), residual

    def reduce_sparse(
        self, group: BucketGroup, handed: Sequence[Handed], density: float, step: int, report: NonFiniteReport,
        confirm: Callable[[Digest], None],
    ) -> tuple[list[BucketResult], ReductionEvent]:  # fmt: skip
        """Exchange a group of buckets; `report` gets the reason if that is lost.

        `confirm` gets a digest of the result, which must be the same on all ranks, before the result is written.
        """
        recorder = ReductionRecorder(self.meter, step, group.index, group.size)
        members = [self._member(one) for one in handed]
        acc = Accumulator([member.work for member in members], [member.residual for member in members])
        comm = SparseCommunicator(
            self.meter, group.size, step=step, bucket=group.index, values=self._values,
            stopwatch=recorder.watch, blocked_before=self.blocked,
        )  # fmt: skip
        k = target_count(group.compressible, density)
        with self._prepared(members):
            inspect = partial(report.inspect, group.members)
            reduction, found = reduce_step(
                self.settings.algorithm, comm, acc, k, group.tracking, inspect,
                lambda reduction: confirm(digest_of(comm, reduction)),
            )  # fmt: skip
            if reduction.skipped:
                _restore(members)
        group.tracking = reduction.state
        self.blocked = recorder.exchange
        results = [self._result(member, place, acc, reduction) for place, member in enumerate(members)]
        if not reduction.skipped:
            self._check_band(group, reduction.local_count, k, step)
        always_dense = group.size - group.compressible
        event = recorder.close(
            SPARSE, self.settings.algorithm.name,
            Volume.of(group.compressible, found) + Volume.of(always_dense, None), comm,
            target_count=k + always_dense,
            local_count=reduction.local_count + always_dense,
            threshold=reduction.threshold,
            global_threshold=reduction.global_threshold,
            exact=reduction.exact,
            residual_norm=math.hypot(*(self.residual_norm(m.handed.state, m.residual, step) for m in members)),
        )  # fmt: skip
        return results, event

    def _member(self, handed: Handed) -> _Member:
        work = handed.unscaled()
        return _Member(handed, work, self.residuals.flat(handed.state.bucket, work.device))

    @contextmanager
    def _prepared(self, members: Sequence[_Member]) -> Iterator[None]:
        """What comes before the algorithm sees a bucket, and what is undone afterwards."""
        with ExitStack() as stack:
            try:
                for member in members:
                    bucket = member.handed.state.bucket
                    idle = stack.enter_context(self.set_aside(bucket, member.work, member.residual))
                    if self.settings.momentum:
                        member.velocity = self.velocities.advance(bucket, member.work, idle)
                    self._average_always_dense(member)
                yield
            except BaseException:
                _restore(members)
                raise

    def _result(self, member: _Member, place: int, acc: Accumulator, reduction: Reduction) -> BucketResult:
        state, masked, nonzeros = member.handed.state, None, None
        if reduction.skipped:
            return BucketResult(member.handed, member.work)
        sent = SentEntries(acc, place, reduction.leaving)
        if state.always_dense.numel():
            member.work[state.always_dense] = member.mean
        if member.velocity is not None:
            masked = self.velocities.commit(state.bucket, member.velocity, sent.vectors())
        if self.settings.ranks_per_host > 1 and reduction.mean is None:
            nonzeros = [state.always_dense, *(acc.split_by_piece(part)[place].indices for part in reduction.parts)]
        return BucketResult(member.handed, member.work, sent, state.always_dense, masked, nonzeros=nonzeros)

    def untouched(self, handed: Handed, dense: bool, step: int) -> tuple[list[BucketResult], ReductionEvent]:
        """A bucket that comes after the one that lost the step: nothing is sent and nothing changes."""
        state, phase = handed.state, DENSE if dense else SPARSE
        recorder = ReductionRecorder(self.meter, step, state.index, state.bucket.size)
        name = "dense" if dense else self.settings.algorithm.name
        volume = Volume.of(state.bucket.size, None if dense else 0)
        event = recorder.close(phase, name, volume, residual_norm=state.residual_norm)
        return [BucketResult(handed, handed.grad)], event

    @contextmanager
    def set_aside(self, bucket: Bucket, grad: Tensor, residual: Tensor | None) -> Iterator[list[slice]]:
        """Keep back the residuals of parameters that got no gradient here, and yield where those are.

        DDP drops the result of a parameter that no rank has used. If every rank that has not used it sends
        nothing, nothing is dropped.
        """
        if residual is None or not self.unused_stay:
            yield []
            return
        idle = _idle_places(bucket, grad)
        kept = [residual[place].clone() for place in idle]
        for place in idle:
            residual[place].zero_()
        try:
            yield idle
        finally:
            for place, mine in zip(idle, kept, strict=True):
                residual[place].add_(mine)  # a merge elsewhere may have given something back here

    def _average_always_dense(self, member: _Member) -> None:
        """Average the entries that are always dense, and clear them so that no selection finds them.

        A mean that is not finite is so on all ranks: it stays in `work`, where each of them will find it.
        """
        entries, work, residual = member.handed.state.always_dense, member.work, member.residual
        if not entries.numel():
            return
        kept = member.kept = residual[entries]
        mean = member.mean = (work[entries] + kept).mul_(1.0 / self.meter.world)
        if self.meter.world > 1:  # in host memory: this thread must not use the communicator of nccl
            here = mean.cpu()
            self.meter.all_reduce_(here, "always dense")
            mean = member.mean = here.to(mean.device)
        residual[entries] = 0.0
        work[entries] = torch.where(mean.isfinite(), 0.0, mean)

    # The end of the step.

    def commit(self, result: BucketResult) -> None:
        """Put the result into the caller's memory."""
        work, (state, grad, scale) = result.work, result.handed
        if result.emptied:
            self.residuals.drop(state.bucket)
        if work is grad:
            return
        if scale is not None:
            work.mul_(scale)
        if grad.dtype.itemsize >= work.dtype.itemsize:
            grad.copy_(work)
            return
        grad.copy_(narrow(work, grad.dtype))
        residual = self.residuals.get(state.bucket, work.device)
        if residual is not None and self.meter.rank == 0:  # what the type cannot hold stays with rank 0
            residual.add_((work - grad).div_(scale or 1.0), alpha=self.meter.world)

    def rollback(self, result: BucketResult, overwritten: bool = False, nan: bool = False) -> None:
        """As if the bucket had sent nothing: its gradient stays in the residual, and the result is empty.

        If its memory is `overwritten`, entries that were averaged densely are lost, and it is left as it is. With
        `nan`, it becomes NaN even if no scale is known.
        """
        (state, grad, scale), entries = result.handed, None if overwritten else result.dense_entries
        if result.sent is not None or entries is not None:
            residual = self.residuals.flat(state.bucket, result.work.device)
            for part in result.sent.vectors() if result.sent is not None else ():
                backend(residual).scatter_add_(residual, part.indices, part.values)
            if entries is not None:  # each rank takes its share of the sum, so that no mass is lost
                residual[entries] += result.work[entries].float()
        if result.masked is not None:
            masked, values = result.masked
            self.velocities.flat(state.bucket)[masked] = values
        if not overwritten:
            _clear(grad, nan or scale is not None)

    def keep(self, handed: Handed) -> None:
        """Keep the gradient of a bucket that was not reduced in the residual, if it is finite."""
        bucket, work = handed.state.bucket, handed.unscaled()
        if all_finite(work):
            self.velocities.commit(bucket, self.velocities.advance(bucket, work, ()), ())
            self.residuals.flat(bucket, work.device).add_(work)
        _clear(handed.grad, handed.scale is not None)

    # Metrics.

    def residual_norm(self, state: BucketState, residual: Tensor | None, step: int) -> float:
        """The norm of a residual, now or when it was last measured; 0 if there is none."""
        if residual is None:
            return 0.0
        if (state.bucket.size <= _SMALL and residual.is_cpu) or step % _NORM_EVERY == 0:
            state.residual_norm = float(torch.linalg.vector_norm(residual))
        return state.residual_norm

    def _check_band(self, group: BucketGroup, count: int, k: int, step: int) -> None:
        low, high = self.settings.algorithm.band
        if low * k <= count <= high * k or group.warned:
            return
        group.warned = True
        _log.warning(
            "step %d: rank %d sent %.3g %% of bucket %d instead of %.3g %%%s",
            step, self.meter.global_rank(self.meter.rank), 100 * count / group.compressible, group.index,
            100 * k / group.compressible,
            " (fewer entries are not zero)" if count < k else "",
        )  # fmt: skip


def _idle_places(bucket: Bucket, grad: Tensor) -> list[slice]:
    """Where the parameters lie whose gradient is all zeros. Few start with a zero, so few are looked at whole.

    On a device all are looked at, for one answer.
    """
    if not grad.is_cpu:
        norms = torch._foreach_norm([grad[place] for place in bucket.filled], math.inf)
        return [
            place
            for place, norm in zip(bucket.filled, torch.stack(list(norms)).tolist(), strict=True)
            if norm == 0
        ]
    first = grad.index_select(0, bucket.starts)
    if first.all():
        return []
    suspects = [bucket.filled[index] for index in (first == 0).nonzero().flatten().tolist()]
    return [place for place in suspects if not bool(grad[place].any())]


def _restore(members: Sequence[_Member]) -> None:
    """Give residuals back what they had of the entries that are always dense."""
    for member in members:
        if member.kept.numel():
            member.residual[member.handed.state.always_dense] = member.kept


def _clear(grad: Tensor, scaled: bool) -> None:
    """Leave nothing to apply; a GradScaler must see that something was wrong."""
    grad.fill_(math.nan if scaled else 0.0)
