"""All buckets of a step: dense or sparse, and lost together when something is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Communicator, Metered, agree
from ..feedback.buckets import Bucket
from ..metrics.events import DENSE, SPARSE, MetricsSink, ReductionEvent, StepEvent, Told, combine
from .bucket_reducer import BucketReducer
from .bucket_state import BucketResult, BucketState
from .dense_allreduce import PostedSums
from .hosts import Host
from .nonfinite import NonFiniteReport, complain
from .settings import Settings
from .small_sums import Poster
from .verdict import hear, tell, with_host
from .ways import Ways

_ABANDONED = "abandoned"


class _Waiting(NamedTuple):
    lane: BucketState
    grad: Tensor
    scale: float | None
    density: float


class StepReducer:
    """Reduces one bucket after the other, in the same order on all ranks.

    One thread calls it, or the worker; only dense sums are begun by one and ended by the other at the same time.
    """

    def __init__(
        self,
        settings: Settings,
        comm: Communicator,
        sinks: Iterable[MetricsSink] = (),
        unused_stay: bool = False,
        poster: Poster | None = None,
    ) -> None:
        self.settings = settings
        self.meter = Metered(comm)
        self.sinks = list(sinks)
        self.step = 0
        self.skipped = False
        """Whether the last step was."""
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.host = Host(self.meter, settings.ranks_per_host) if settings.ranks_per_host > 1 else None
        between = self.meter if self.host is None else self.host.between()
        self.reducer = BucketReducer(settings, between, unused_stay)
        self._sums = PostedSums(self.reducer, poster if self.host is None else None)
        self.lanes: dict[Bucket, BucketState] = {}
        self._told: Told | None = None
        self._handed = 0
        """Buckets of this step so far."""
        self._waiting: list[_Waiting] = []
        """Sparse ones that are not reduced yet: they will share messages."""
        self._expected = 0.0
        """Entries that those will send."""
        self._summed: list[tuple[BucketState, float]] = []
        """Those whose sums were begun before the one ahead had ended, and how much longer each took."""
        self._settled: list[BucketResult] = []
        self._events: list[ReductionEvent] = []
        self.ways = Ways(settings)
        self._culprits = NonFiniteReport(
            settings, f"rank {self.meter.rank}" if self.host is None else str(self.host)
        )

    @torch.no_grad()
    def reduce(self, bucket: Bucket, grad: Tensor, scale: float | None = None) -> None:
        """The mean over ranks of `grad` (1-D), in its place after finish(). A GradScaler may have scaled it."""
        self.end_sums()
        lane = self._lane(bucket, grad)
        self._handed += 1
        density = self.ways.density(lane, self.step)
        if self.host is not None:
            self.host.average(bucket, grad)
        if not self.exchanges:  # the leader does the rest
            self._settled.append(BucketResult(lane, grad, grad, scale))
        elif self._culprits.named is not None:
            phase = DENSE if density is None else SPARSE
            self._note([lane], *self.reducer.untouched(lane, grad, scale, phase, self.step))
        elif density is None:
            inspect = self._culprits.in_dense(lane, self.reducer.residuals.peek(bucket) is None)
            self._note([lane], *self.reducer.dense(lane, grad, scale, self.step, inspect))
        else:
            if self._waiting and self._waiting[0].grad.device != grad.device:
                self._reduce_waiting()
            self._waiting.append(_Waiting(lane, grad, scale, density))
            self._expected += lane.free * density
            if self._expected >= self.settings.join:
                self._reduce_waiting()

    @property
    def goes_sparse(self) -> bool:
        """Whether the next step goes sparse, however long it takes."""
        return self.ways.surely_sparse(self.step)

    @property
    def exchanges(self) -> bool:
        """Whether this rank has residuals, and no other one of its host speaks for it."""
        return self.host is None or self.host.leads

    def posts(self, bucket: Bucket, grad: Tensor) -> bool:
        """Whether the next bucket can be given to post(), if none of this step was given to reduce()."""
        lane = self.lanes.get(bucket)
        if lane is None or lane.index != self._handed or not lane.always_dense.is_cpu:
            return False
        return self._sums.possible(grad) and self.ways.density(lane, self.step) is None

    def post(self, bucket: Bucket, grad: Tensor, scale: float | None = None) -> None:
        """Begin the dense sum of a bucket. Another thread may be ending those that were begun before."""
        self._sums.begin(self.lanes[bucket], grad, scale)
        self._handed += 1

    def sum_alone(self, bucket: Bucket, grad: Tensor, scale: float | None, start: float) -> None:
        """post() and finish() of a step that has no other bucket, by a short cut: small models take no time."""
        lane, step = self.lanes[bucket], self.step
        summed = self._sums.at_once(lane, grad, scale)
        if summed is None:
            self.finish(start, start)
            return
        self.ways.time_dense(lane, summed.stop - summed.start, time.perf_counter() - start, step)
        self._decide([lane])
        stop = time.perf_counter()

        def tell() -> StepEvent:
            return combine(
                step, [summed.event(step)], skipped=False, culprits=(), start=start, handed_over=start, stop=stop
            )

        self._conclude(Told(tell))

    @property
    def last(self) -> StepEvent | None:
        """What happened in the last step."""
        return None if self._told is None else self._told.event

    def end_sums(self, most: float = math.inf) -> None:
        """Wait for sums that were begun, and take in what they give."""
        while self._sums.under_way and most > 0:
            one, most = self._sums.under_way[0], most - 1
            inspect = self._culprits.in_posted(one) if self._culprits.named is None else None
            settled, event = self._sums.end(one, self.step, inspect)
            self._sums.under_way.popleft()
            self._settled.append(settled)
            self._events.append(event)
            self._summed.append((one.lane, event.stop - event.start))

    def _reduce_waiting(self) -> None:
        """Reduce the sparse buckets that have come in since the last time, with messages that they share."""
        waiting, self._waiting, self._expected = self._waiting, [], 0.0
        if not waiting:
            return
        if self._culprits.named is not None:
            for one in waiting:
                self._note([one.lane], *self.reducer.untouched(one.lane, one.grad, one.scale, SPARSE, self.step))
            return
        lanes, last = [one.lane for one in waiting], waiting[-1]
        inspect = self._culprits.in_sparse(lanes)
        settled, event = self.reducer.sparse(
            lanes, [one.grad for one in waiting], last.scale, last.density, self.step, inspect
        )
        self._note(lanes, settled, event)

    def _note(
        self, lanes: Sequence[BucketState], settled: BucketResult | Sequence[BucketResult], event: ReductionEvent
    ) -> None:
        self._settled += [settled] if isinstance(settled, BucketResult) else settled
        self._events.append(event)
        if self._culprits.named is None:  # a lost reduction ends early: its time tells nothing
            _time(lanes, event.phase == DENSE, event.stop - event.start)

    @torch.no_grad()
    def finish(self, start: float, handed_over: float) -> StepEvent:
        """Settle the step: hand out the results of all buckets or of none, and tell the sinks."""
        self.end_sums()
        self._reduce_waiting()
        if self.host is not None and not self.host.leads:
            self._culprits.named, self._events = hear(self.host, self._settled, self.step)
        skipped, culprits = self._culprits.named is not None, self._all_culprits()
        for settled in self._settled:
            if skipped:
                self.reducer.rollback(settled)
            else:
                self.reducer.commit(settled)
        if not skipped:  # sums that are under way together end together: the first would seem to take all the time
            _time([lane for lane, _ in self._summed], True, sum(seconds for _, seconds in self._summed))
        reductions = [replace(event, skipped=True) for event in self._events] if skipped else self._events
        self._compare_ways([settled.lane for settled in self._settled], () if skipped else reductions, start)
        if self.host is not None:
            if self.host.leads:
                tell(self.host, self._settled, self._events, culprits if skipped else None)
            reductions = with_host(self.host, reductions)
        self._forget()
        event = combine(
            self.step, reductions, skipped=skipped, culprits=culprits,
            start=start, handed_over=handed_over, stop=time.perf_counter(),
        )  # fmt: skip
        self._conclude(Told(lambda: event), skipped)
        if skipped:
            complain(event, self.skipped_in_a_row, self.settings.max_skipped, aloud=self.meter.rank == 0)
        return event

    def _conclude(self, told: Told, skipped: bool = False) -> None:
        """Count the step, and tell the sinks of it."""
        self._told, self.skipped = told, skipped
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.step += 1
        for sink in self.sinks:
            sink.emit(told.event)

    def abandon(self, overwritten: bool = False) -> None:
        """Take the step back after an error: what buckets have sent returns to their residuals.

        What their memory held is lost if it was `overwritten` by the next gradients, which are left as they are.
        """
        self.end_sums()
        self._take_back(overwritten)
        if self.host is not None:  # members wait: their next gradients go where the leader has just read
            if self.host.leads:
                self.host.tell(_ABANDONED)
            else:
                self.host.hear()

    def give_up(self) -> None:
        """The same when other ranks will not answer any more."""
        self._sums.cancel()
        self._take_back()

    def _take_back(self, overwritten: bool = False) -> None:
        while self._settled:
            self.reducer.rollback(self._settled.pop(), overwritten)
        for one in self._waiting:
            if not overwritten:
                self.reducer.keep(one.lane, one.grad, one.scale)
        self._forget()

    def _forget(self) -> None:
        self._settled, self._events, self._handed = [], [], 0
        self._waiting, self._expected, self._summed = [], 0.0, []
        self._culprits.forget()

    def _all_culprits(self) -> tuple[str, ...]:
        """The same on all ranks; a host's leader has told them to the others."""
        if self._culprits.named is None or not self.exchanges:
            return tuple(self._culprits.named or ())
        return self._culprits.shared(self.reducer.meter)

    # Buckets.

    def _lane(self, bucket: Bucket, grad: Tensor) -> BucketState:
        """The lane of a bucket. A new one is made by all ranks together, who make sure they mean the same."""
        index = self._handed
        lane = self.lanes.get(bucket)
        if lane is not None and lane.index == index and lane.always_dense.device == grad.device:
            return lane
        if not grad.is_floating_point():
            raise ValueError(f"gradients of type {grad.dtype} cannot be reduced (in {bucket}): only floating ones")
        terms = {"step": self.step, "bucket": index, "parameters": bucket.names, "sizes": bucket.sizes}
        agree(self.meter, terms | {"dtype": grad.dtype} | self.settings.terms())
        always = [
            torch.arange(place.start, place.stop)
            for name, place in bucket.places.items()
            if self.settings.always_dense(name, place.stop - place.start)
        ]
        entries = torch.cat(always) if always else torch.empty(0, dtype=torch.int64)
        known = lane or BucketState(bucket, index, entries)
        moved = set(bucket.names)
        self.lanes = {old: other for old, other in self.lanes.items() if moved.isdisjoint(old.names)}
        self.lanes[bucket] = replace(known, index=index, always_dense=entries.to(grad.device))
        return self.lanes[bucket]

    def _compare_ways(
        self, lanes: Sequence[BucketState], reductions: Sequence[ReductionEvent], start: float
    ) -> None:
        """Note what the step took, and at the end of a trial let all ranks decide; a leader tells its host."""
        self.ways.time_step(lanes, reductions, start, self.step)
        if self.exchanges:
            self._decide(lanes)

    def _decide(self, lanes: Sequence[BucketState]) -> None:
        if self.ways.decides(self.step):
            self.ways.decide(self.reducer.meter, lanes, self.step)


def _time(lanes: Sequence[BucketState], dense: bool, seconds: float) -> None:
    """Note what buckets took that were reduced together, shared out by their sizes."""
    size = sum(lane.bucket.size for lane in lanes)
    for lane in lanes:
        lane.choice.note(dense, seconds * (lane.bucket.size / size if size else 1.0))
