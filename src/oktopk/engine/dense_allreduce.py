"""Dense sums that go DDP's way: begun by whoever hands in the bucket, and waited for by another thread.

    hook     begin the sum of bucket 0 ── of bucket 1 ── of the last one ── wait for that, settle the step
    worker                          └─ wait, look at 0 ── wait, look at 1 ─┘

A thread that is woken, or connections that were idle, cost a small model more than its sum. Buckets go this way as
long as those of their step are dense, which all ranks know without asking.

The pass that divides by the number of ranks also looks whether all is finite. A rank where it is not marks the
first entry with a NaN: then one entry of the sum tells everybody, and nobody has to look at all of it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CommError
from ..feedback.accumulator import Accumulator
from ..kernels import backend
from ..metrics.events import DENSE, ReductionEvent, Seconds, Span, Volume, Wire
from ..metrics.traffic import Operation, Traffic, modelled, ring_moves
from ..wire.sparse_vector import all_finite
from .bucket_reducer import BucketReducer, Inspect
from .bucket_state import BucketResult, BucketState, dense_settled, not_finite
from .small_sums import SMALL_BYTES, Moved, Poster, SmallSums, Wait

_OPERATION = Operation("all_reduce", "dense")

_LARGEST = (1 - 2**-10) * torch.finfo(torch.float32).max
"""The largest mean that counts as finite: a little less than the largest number, so that no sum overflows."""


class Posted(NamedTuple):
    """A bucket whose sum is under way."""

    lane: BucketState
    grad: Tensor
    scale: float | None
    acc: Accumulator
    mean: Tensor
    """What is summed: the memory of the gradient itself if nothing is added to it."""
    found: list[str] | None
    """The parameters that were not finite here, if the sum may be marked; None if it must be looked at."""
    idle: bool
    """Some parameter has no gradient here: its residual was set aside."""
    aside: ExitStack
    wait: Wait
    moved: Moved
    begun: float
    posted: float

    def finite(self) -> bool:
        """The same on all ranks."""
        return all_finite(self.mean) if self.found is None else math.isfinite(self.mean[0])

    def give_up(self) -> None:
        """Without waiting for it."""
        with self.aside:
            if self.acc.residual is not None:  # else the library may still be at work on the gradient itself
                self.acc.rollback()


class Summed(NamedTuple):
    """A sum that is there: what its event is made of, once somebody asks."""

    lane: BucketState
    nbytes: int
    """Of the gradient."""
    residual_norm: float
    moved: Moved
    before: Mapping[Operation, Traffic]
    """What this rank has sent besides, since the reduction before this one."""
    start: float
    posted: float
    done: float
    stop: float

    def event(self, step: int) -> ReductionEvent:
        size, exchange = self.lane.bucket.size, self.done - self.posted
        traffic = {**self.before, _OPERATION: modelled(*self.moved, exchange)}
        return ReductionEvent(
            step=step, bucket=self.lane.index, phase=DENSE, algorithm="dense",
            volume=Volume(size, size, self.nbytes), target_count=size, local_count=size,
            threshold=0.0, global_threshold=0.0, exact=False, residual_norm=self.residual_norm,
            wire=Wire.of(traffic), seconds=Seconds(exchange=exchange, other=self.stop - self.start - exchange),
            slowest_rank=None, skipped=False, start=self.start, stop=self.stop,
            spans=(Span("exchange", self.posted, self.done),), traffic=traffic,
        )  # fmt: skip


class PostedSums:
    """Begins sums, and takes in what they give in the same order. One thread may begin while another one ends."""

    def __init__(self, reducer: BucketReducer, poster: Poster | None) -> None:
        self._reducer, self._poster = reducer, poster
        self._small = None
        if poster is not None and reducer.settings.by_the_clock and reducer.meter.world > 1:
            self._small = SmallSums(reducer.meter, poster, _OPERATION)
        self.under_way: deque[Posted] = deque()
        self._free = 0.0
        """When the last sum was done with: the next one counts from there."""

    def possible(self, grad: Tensor) -> bool:
        return self._poster is not None and grad.is_cpu and not self._reducer.settings.momentum

    def begin(self, lane: BucketState, grad: Tensor, scale: float | None) -> None:
        """Begin the sum of a bucket."""
        assert self._poster is not None
        one = self._ready(lane, grad, scale)
        try:
            wait = self._poster.post_sum(one.mean, _OPERATION)
        except BaseException:
            one.give_up()
            raise
        self.under_way.append(one._replace(wait=wait, posted=time.perf_counter()))

    def at_once(self, lane: BucketState, grad: Tensor, scale: float | None) -> Summed | None:
        """Make the sum of a bucket that is alone in its step, which all ranks know.

        None if more is to be done, because of a residual, a scale, or numbers that are not finite: end() does it.
        """
        one = self._ready(lane, grad, scale)
        self.under_way.append(one)
        one = self.under_way[0] = one._replace(moved=self._sum(one), wait=_there)
        if one.acc.residual is not None or scale is not None or not one.finite():
            return None
        self.under_way.clear()
        return self._summed(one, 0.0, time.perf_counter())

    def _ready(self, lane: BucketState, grad: Tensor, scale: float | None) -> Posted:
        """What is to be summed, divided by the number of ranks."""
        begun, idle, aside = time.perf_counter(), False, ExitStack()
        work, residual = self._reducer.dense_work(lane, grad, scale)
        acc, mean, world = Accumulator(work, residual), work, self._reducer.meter.world
        try:
            if residual is not None:
                idle = bool(aside.enter_context(self._reducer.set_aside(lane.bucket, work, residual)))
                mean = acc.values.clone()
            found = _divide(mean, world, lane)
        except BaseException:
            with aside:
                acc.rollback()
            raise
        moved = ring_moves(mean.nbytes, world)
        return Posted(
            lane, grad, scale, acc, mean, found, idle, aside, _not_there, moved, begun, time.perf_counter()
        )  # fmt: skip

    def _sum(self, one: Posted) -> Moved:
        assert self._poster is not None
        if self._small is not None and 0 < one.mean.nbytes <= SMALL_BYTES:
            return self._small.sum_(one.mean)
        self._poster.post_sum(one.mean, _OPERATION)()
        return one.moved

    def end(self, one: Posted, step: int, inspect: Inspect | None) -> tuple[BucketResult, ReductionEvent]:
        """Wait for a sum. Without `inspect` it does not count: the step is lost already."""
        one.wait()  # if that fails, the sum is still under way: cancel() takes it back
        done = time.perf_counter()
        with one.aside:
            skipped = inspect is None or not one.finite()
            if not skipped:
                one.acc.write_dense_mean(one.mean)
            else:
                if inspect is not None:
                    inspect(one.acc)
                one.acc.rollback()
        settled = dense_settled(one.lane, one.grad, one.acc, one.scale, skipped, one.idle)
        norm = self._reducer.measure(one.lane, one.acc.residual, step)
        return settled, self._summed(one, norm, done).event(step)

    def _summed(self, one: Posted, norm: float, done: float) -> Summed:
        meter, free = self._reducer.meter, self._free
        start, posted = max(one.begun, free), min(max(one.posted, free), done)
        self._reducer.blocked = done - posted
        stop = self._free = time.perf_counter()
        return Summed(
            one.lane, one.grad.nbytes, norm, one.moved, meter.take(), start, posted, done, stop
        )  # fmt: skip

    def cancel(self) -> None:
        """Without waiting: the others will not answer any more."""
        while self.under_way:
            self.under_way.popleft().give_up()


def _there() -> None:
    """Waits for a sum that is there already."""


def _not_there() -> None:
    raise CommError(f"{_OPERATION}: this sum was not made")


def _divide(mean: Tensor, world: int, lane: BucketState) -> list[str] | None:
    """By the number of ranks, before the sum as in DDP: only that gives the same bits. Marks what is not finite.

    Returns Posted.found. Other types than float32 are not marked: what their sums come to is not known before.
    """
    if mean.dtype != torch.float32 or not mean.numel():
        mean.mul_(1.0 / world)
        return None
    if backend(mean).scale_(mean, 1.0 / world) <= _LARGEST / world:
        return []
    found = not_finite(lane, mean)
    mean[0] = math.nan
    return found
