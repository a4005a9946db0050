"""The dense all-reduce: begun as soon as a bucket is ready, waited for at the end of the step.

    hook      begin bucket 0 ── begin bucket 1 ── … ── begin the last one ── finish(): wait for 0, 1, …, commit
    library            └─ sums ────────── sums ─────────────────── sums ─┘

The pass that divides by the number of ranks also checks that all entries are finite. A rank that finds one that
is not marks the first entry with a NaN: one entry of the sum then tells every rank, and nobody has to inspect the
rest. With `warmup_values` a 16-bit copy is summed instead during the warm-up, the mark included.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import PendingSum
from ..feedback.accumulator import Accumulator
from ..kernels import backend
from ..metrics.events import DENSE, ReductionEvent, Volume
from ..wire.sparse_vector import all_finite
from .bucket_reducer import BucketReducer
from .bucket_state import BucketResult, BucketState, Handed
from .nonfinite import NonFiniteReport
from .recorder import ReductionRecorder

_LARGEST = (1 - 2**-10) * torch.finfo(torch.float32).max
"""The largest mean that counts as finite: a little less than the largest number, so that no sum overflows."""
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _Prepared(NamedTuple):
    """A bucket that is ready to be summed."""

    handed: Handed
    acc: Accumulator
    mean: Tensor
    """This rank's share, and then the mean: the memory of the gradient itself if nothing is added to it."""
    summed: Tensor
    """What is summed: the share itself, or a copy in 16 bits."""
    velocity: Tensor | None
    nonfinite: list[str] | None
    """The parameters that were not finite here, if the sum may be marked; None if the sum must be inspected."""
    idle: bool
    """Some parameter has no gradient here: its residual was set aside."""
    aside: ExitStack
    begun: float

    def sum_is_finite(self) -> bool:
        """The same on all ranks."""
        return all_finite(self.mean) if self.nonfinite is None else math.isfinite(self.mean[0])

    def cancel(self) -> None:
        """Roll back without waiting for the sum."""
        with self.aside:
            if self.acc.residuals:  # otherwise the library may still be at work on the gradient itself
                self.acc.rollback()


class _Waited:
    """A sum that was waited for."""

    def wait(self) -> None:
        pass


class DenseAllReduce:
    """Averages buckets in the order they are begun, the same on all ranks."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer
        self.under_way: deque[tuple[_Prepared, PendingSum, float]] = deque()
        """Buckets, their sums, and when those were begun."""
        self._finite: deque[bool] = deque()
        """Whether sums on a device are finite, as far as the host has asked: once per step."""
        self._free = 0.0
        """When the last sum was finished: the time of the next one counts from there."""
        self._dropping = False
        """Whether a sum of this step was not finite."""
        self._warmup_dtype = _NARROW.get(reducer.settings.warmup_values) if reducer.meter.world > 1 else None
        self.warms_up = False
        """Whether the step belongs to the warm-up."""

    def begin(self, handed: Handed) -> None:
        """Begin to average a bucket. Its memory must be left alone until finish()."""
        bucket = self._prepare(handed)
        try:
            pending = self._reducer.meter.begin_all_reduce(bucket.summed, "dense")
        except BaseException:
            bucket.cancel()
            raise
        self.under_way.append((bucket, pending, time.perf_counter()))

    def _prepare(self, handed: Handed) -> _Prepared:
        """What is to be summed: the gradient and its residual, divided by the number of ranks."""
        begun, reducer, idle, velocity = time.perf_counter(), self._reducer, [], None
        state = handed.state
        work, residual = reducer.dense_work(handed)
        acc = Accumulator([work], [] if residual is None else [residual])
        mean, aside = work, ExitStack()
        try:
            idle = aside.enter_context(reducer.set_aside(state.bucket, work, residual))
            velocity = reducer.velocities.advance(state.bucket, work, idle)
            if residual is not None:
                mean = acc.values.clone()
            nonfinite, largest = _divide(mean, reducer.meter.world, state)
            summed = mean
            if self.warms_up and self._warmup_dtype is not None and mean.dtype == torch.float32:
                summed = _narrow(mean, self._warmup_dtype, reducer.meter.world, largest)
        except BaseException:
            with aside:
                acc.rollback()
            raise
        return _Prepared(handed, acc, mean, summed, velocity, nonfinite, bool(idle), aside, begun)

    def finish_next(self, report: NonFiniteReport, step: int) -> tuple[list[BucketResult], ReductionEvent]:
        """Wait for the next sum that is under way. Sums behind one that is not finite do not count."""
        if not self.under_way[0][0].mean.is_cpu and not self._finite:
            self._read_device()
        bucket, pending, posted = self.under_way[0]
        pending.wait()  # if that fails, the sum is still under way: cancel() rolls it back
        done = time.perf_counter()
        self.under_way.popleft()
        if bucket.summed is not bucket.mean and bucket.mean.is_cpu:
            bucket.mean.copy_(bucket.summed)
        finite = bucket.sum_is_finite() if bucket.mean.is_cpu else self._finite.popleft()
        with bucket.aside:
            if not self._dropping and not finite:
                self._dropping = True
                if bucket.nonfinite is not None:
                    report.add(bucket.nonfinite)
                else:
                    report.add_sum(bucket.handed.state, bucket.mean)
            if self._dropping:
                bucket.acc.rollback()
            else:
                bucket.acc.write_dense_mean(bucket.mean)
                self._reducer.velocities.commit(bucket.handed.state.bucket, bucket.velocity, ())
        result = self._result(bucket, self._dropping)
        self._dropping = self._dropping and bool(self.under_way)
        return [result], self._record(bucket, posted, done, step)

    def _read_device(self) -> None:
        """Let the stream wait for all sums on the next one's device, and the host ask once if they are finite."""
        device, flags = self.under_way[0][0].mean.device, []
        for place, (bucket, pending, posted) in enumerate(self.under_way):
            if bucket.mean.device == device:
                pending.wait()
                self.under_way[place] = bucket, _Waited(), posted
                if bucket.summed is not bucket.mean:
                    bucket.mean.copy_(bucket.summed)
                flags.append(bucket.mean.isfinite().all())
        self._finite.extend(torch.stack(flags).tolist())

    def _result(self, bucket: _Prepared, lost: bool) -> BucketResult:
        # Only float32 is summed alike with a residual and without one, so that ranks need not agree on `emptied`.
        float32 = bucket.handed.grad.dtype == torch.float32
        emptied = bool(bucket.acc.residuals) and float32 and not (lost or bucket.idle)
        entries = None if lost else slice(None)
        return BucketResult(bucket.handed, bucket.acc.works[0], dense_entries=entries, emptied=emptied)

    def _record(self, bucket: _Prepared, posted: float, done: float, step: int) -> ReductionEvent:
        reducer, (state, grad, _) = self._reducer, bucket.handed
        size = state.bucket.size
        posted = min(max(posted, self._free), done)
        recorder = ReductionRecorder(reducer.meter, step, state.index, size, max(bucket.begun, self._free))
        recorder.add_exchange(posted, done)
        reducer.blocked = done - posted
        norm = reducer.residual_norm(state, next(iter(bucket.acc.residuals), None), step)
        event = recorder.close(
            DENSE, "dense", Volume(size, size, grad.nbytes), local_count=size, residual_norm=norm
        )
        self._free = event.stop
        return event

    def drop_overwritten(self) -> None:
        """Wait for all sums, whose gradients the next ones have overwritten; residuals keep what they have."""
        while self.under_way:
            bucket, pending, _ = self.under_way[0]
            pending.wait()
            self.under_way.popleft()
            bucket.aside.close()

    def cancel(self) -> None:
        """Roll back without waiting: the other ranks will not answer any more."""
        self._dropping = False
        self._finite.clear()
        while self.under_way:
            self.under_way.popleft()[0].cancel()


def _divide(mean: Tensor, world: int, state: BucketState) -> tuple[list[str] | None, float]:
    """Divide by the number of ranks before the sum, as DDP does, for the same bits; mark non-finite vectors.

    Returns _Prepared.nonfinite, and the largest magnitude, or NaN. Other types than float32 are not marked: their
    sums may overflow all the same. Nor are those of a device, where the host would have to wait: its sums are
    inspected, all at once.
    """
    if mean.dtype != torch.float32 or not mean.numel() or not mean.is_cpu:
        mean.mul_(1.0 / world)
        return None, math.inf
    largest = backend(mean).scale_(mean, 1.0 / world)
    if largest <= _LARGEST / world:
        return [], largest
    found = state.nonfinite(mean)
    mean[0] = math.nan
    return found, largest


def _narrow(share: Tensor, dtype: torch.dtype, world: int, largest: float) -> Tensor:
    """A rank's share in 16 bits. What is too large is clipped, so that no sum overflows; NaNs stay NaNs.

    Half of the range is left for the sums, each of which may round up.
    """
    most = 0.5 * torch.finfo(dtype).max / world
    return (share if largest <= most else share.clamp(-most, most)).to(dtype)
