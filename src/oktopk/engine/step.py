"""One step: all of its buckets, dense or sparse, committed together or rolled back together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import Communicator, Digest, Metered, agree, post_digest
from ..comm.fixed import FixedCollectives
from ..feedback.buckets import Bucket
from ..metrics.events import MetricsSink, ReductionEvent, StepEvent, combine
from ..metrics.traffic import merge
from .autotune import Autotune
from .bucket_reducer import BucketReducer
from .bucket_state import BucketResult, BucketState, BucketTable, Handed
from .dense_allreduce import DenseAllReduce
from .device.reducer import DeviceReducer
from .hierarchy.local_group import LocalGroup
from .nonfinite import NonFiniteReport, SkippedSteps
from .recorder import add_traffic
from .settings import GRADIENTS, Settings
from .voice.voice import StepSinks, Voice


class StepReducer:
    """Reduces the buckets of a step in the order they are handed in, which is the same on all ranks.

        begin()                 dense or sparse? decided once, for all buckets
        reduce(bucket) …        a dense sum begins; sparse buckets wait until their group is large enough
        finish()                wait for all of them; commit or roll back; metrics; autotune

    One thread calls it at a time. The ranks that exchange (`reducer.meter`) may be fewer than those that skip a
    step and autotune together. A LocalGroup has one exchanging rank, and passes its outcome on to the others.
    Ranks of a device mesh exchange with the replicas of their shard, and decide with the `whole` mesh.
    """

    def __init__(
        self, settings: Settings, comm: Communicator, sinks: Iterable[MetricsSink] = (), unused_stay: bool = False,
        averages: str = GRADIENTS, whole: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.averages = settings, averages
        self._fusion_density = settings.fusion_density
        self.meter = Metered(comm)
        self.whole = None if whole is None else Metered(whole)
        self.everyone = self.whole or self.meter
        """All ranks of the job."""
        self.step = 0
        self.skips = SkippedSteps(settings.max_skipped, speaks=self.everyone.rank == 0)
        self.last: StepEvent | None = None
        self.buckets = BucketTable()
        ranks = settings.ranks_per_host
        self.local = LocalGroup(self.meter, ranks) if ranks > 1 else None
        """The ranks of this host; None if every rank exchanges for itself."""
        exchanging = self.meter if self.local is None else self.local.leaders
        self.reducer = BucketReducer(settings, exchanging, unused_stay)
        self._device: DeviceReducer | None = None
        """Reduces groups without the host. On a mesh another shard may lose a step that this one keeps."""
        if whole is None and DeviceReducer.suits(settings):
            self._device = DeviceReducer(settings, exchanging, self.reducer.residuals, unused_stay)
        self.deciding = self.whole or exchanging
        """The ranks that skip steps and autotune together."""
        self.autotune = Autotune(settings)
        self.voice = Voice(settings, self.autotune, self.everyone.rank, self.everyone.world)
        self.sinks = StepSinks(self.voice, sinks)
        self.density: float | None = None
        """Of the step under way; None if it is dense."""
        self.schedule: list[tuple[int, float | None]] = []
        """The densities of all steps so far, with the step from which on each was used."""
        self._dense = DenseAllReduce(self.reducer)
        here = self.everyone.global_rank(self.everyone.rank)
        self._report = NonFiniteReport(settings, f"rank {here}" if self.local is None else str(self.local))
        self._scale: float | None = None
        """Of a GradScaler, in the step under way."""
        self._handed = 0
        """Buckets of this step so far."""
        self._waiting: list[Handed] = []
        """Sparse buckets that wait for others to be fused with."""
        self._results: list[BucketResult] = []
        self._events: list[ReductionEvent] = []
        self._digests: list[Digest] = []
        """Of the results of sparse groups."""
        self._compare_digests: Callable[[], None] | None = None
        """Receives the digests of other ranks, when this rank has sent its own."""

    @property
    def exchanges(self) -> bool:
        """Whether this rank exchanges with other hosts, and so has residuals."""
        return self.local is None or self.local.leads

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.last is not None and self.last.skipped

    def begin(self) -> None:
        """Decide whether the next step is dense or sparse."""
        self.density = self.autotune.density(self.step)
        self._dense.warms_up = self.autotune.warms_up(self.step)

    def device_collectives(self, device: torch.device) -> FixedCollectives | None:
        """Those by which sparse buckets on this device are reduced without the host; None if they are not."""
        return None if self._device is None else self._device.collectives(device)

    def skip_next(self, nonfinite: Iterable[str], scale: float | None = None) -> None:
        """Let all ranks skip the next step before it begins: its buckets and all state are left untouched."""
        self._scale = scale
        self._report.add(nonfinite)
        self._report.names = list(self._report.gather(self.everyone))

    @torch.no_grad()
    def reduce(self, bucket: Bucket, grad: Tensor, scale: float | None = None) -> None:
        """Replace `grad` (1-D) by its mean over ranks, by the end of finish(); a GradScaler may have scaled it."""
        handed = Handed(self._state_of(bucket, grad), grad, scale)
        if scale is not None:
            self._scale = scale
        self._handed += 1
        if self.local is not None:
            self.local.reduce(bucket, grad)
        dense = self.density is None or handed.state.compressible == 0
        if not self.exchanges:  # the leader does the rest
            self._results.append(BucketResult(handed, grad))
        elif self._report.names is not None:
            self._add(*self.reducer.untouched(handed, dense, self.step))
        elif dense:
            self._dense.begin(handed)
        else:
            self._fuse(handed)

    def _add(self, results: Sequence[BucketResult], event: ReductionEvent) -> None:
        self._results += results
        self._events.append(event)

    def _fuse(self, handed: Handed) -> None:
        """Let a bucket wait for others; reduce the group when it sends enough entries."""
        if self._waiting and self._waiting[0].grad.device != handed.grad.device:
            self._reduce_group()
        self._waiting.append(handed)
        entries = sum(one.state.compressible for one in self._waiting)
        if entries * self._fusion_density >= self.settings.fusion_entries:
            self._reduce_group()

    def _reduce_group(self, last: bool = False) -> None:
        """Reduce the buckets that wait. With the last group of a step, the digest is sent as early as possible."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._report.names is not None:
            for handed in waiting:
                self._add(*self.reducer.untouched(handed, False, self.step))
            return
        assert self.density is not None
        group = self.buckets.group_of([handed.state for handed in waiting])
        collectives = self.device_collectives(waiting[0].grad.device)
        if self._device is not None and collectives is not None:
            self._add(*self._device.reduce(collectives, group, waiting, self.density, self.step))
            return
        confirm = self._post_digest if last else self._digests.append
        self._add(*self.reducer.reduce_sparse(group, waiting, self.density, self.step, self._report, confirm))

    def _finish_dense(self) -> None:
        while self._dense.under_way:
            self._add(*self._dense.finish_next(self._report, self.step))

    @torch.no_grad()
    def finish(self, start: float, handed_over: float) -> StepEvent:
        """Wait for all buckets; then either commit all results, or roll all back and skip the step.

        Args:
            start: when the first bucket was handed in, by time.perf_counter().
            handed_over: when the last one was.
        """
        self._finish_dense()
        self._reduce_group(last=True)
        self._confirm()
        if self._device is not None:
            self._finish_on_device(self._device)
        self._events.sort(key=lambda event: event.bucket)
        if self.local is not None and not self.local.leads:
            self._report.names, self._events = self.local.receive(self._results, self.autotune, self.step)
        counts = self._agree_with_whole()
        skipped, culprits = self._report.names is not None, self._gather_names()
        for result in self._results:
            if skipped:
                self.reducer.rollback(result, nan=self.skips.may_be_scaled)
            else:
                self.reducer.commit(result)
        if skipped and self.skips.may_be_scaled and self.step == self.skips.total:
            self.drop_residuals()
        deciding = self.deciding if self.exchanges else None
        counts = counts and not skipped
        decided = self.autotune.end_step(self.step, self.density, counts, start, handed_over, deciding)
        if self.exchanges:  # what came after the last bucket: digests, names of culprits, a decision
            traffic = self.reducer.meter.pop_traffic()
            if self.whole is not None:
                traffic = merge([traffic, self.whole.pop_traffic()])
            self._events[-1] = add_traffic(self._events[-1], traffic)
        events = [replace(event, skipped=True) for event in self._events] if skipped else self._events
        if self.local is not None:
            if self.local.leads:
                self.local.publish(self._results, self._events, self.autotune, culprits if skipped else None)
            events = self.local.add_costs(events)
        event = combine(
            self.step, events, skipped=skipped, culprits=culprits,
            start=start, handed_over=handed_over, stop=time.perf_counter(),
        )  # fmt: skip
        self.buckets.keep({result.handed.state.bucket for result in self._results})
        self._close(event, decided)
        return event

    def _finish_on_device(self, device: DeviceReducer) -> None:
        """Commit the groups that are on the device, and read what it has told since."""
        if (late := device.read()) is not None:
            self.skips.record_late(late.step, late.nonfinite, self.last)
        if self._report.names is not None:  # by a bucket that was averaged densely
            device.drop(keep=True)
        elif device.nonfinite_here():
            self._report.add(device.names())
        device.finish(self.step)

    def _confirm(self) -> None:
        """Compare the sparse results of all ranks before any of them is applied: one digest for the whole step."""
        if self._digests and self._compare_digests is None:
            self._post_digest()
        if self._compare_digests is not None:
            self._compare_digests()

    def _post_digest(self, *digests: Digest) -> None:
        if self.reducer.meter.world > 1:
            digest = Digest()
            for group in (*self._digests, *digests):
                digest.add(group.value)
            self._compare_digests = post_digest(self.reducer.meter, digest, "the results of the step")

    def _agree_with_whole(self) -> bool:
        """Lose the step if another shard has lost it; whether the step compresses anything on any rank.

        Replicas know the same by now. The rest of the mesh is asked in one small round.
        """
        counts = any(result.handed.state.compressible for result in self._results)
        if self.whole is None:
            return counts
        lost = self._report.names is not None
        answers = self.whole.all_gather_ints([lost, counts], "shards")
        if any(theirs for theirs, _ in answers) and not lost:
            self._report.add(())
        return any(theirs for _, theirs in answers)

    def _gather_names(self) -> tuple[str, ...]:
        """Where numbers were not finite, the same on all ranks; a leader has gathered it for its host."""
        if self._report.names is not None and self.exchanges:
            return self._report.gather(self.deciding)
        return tuple(self._report.names or ())

    def _close(self, event: StepEvent, decided: bool) -> None:
        """Count the step, and pass it on to the sinks, with what ranks have `decided` for the next ones."""
        self._forget()
        if not self.schedule or self.schedule[-1][1] != self.density:
            self.schedule.append((self.step, self.density))
        self.last = event
        self.step += 1
        self.sinks.record(event, decided)
        scale, self._scale = self._scale, None
        if event.skipped or self.skips.in_a_row:
            self.skips.record(event, scale)

    # The scale of a GradScaler that was not known at first.

    @property
    def keeps_unscaled(self) -> bool:
        """Whether residuals or velocities are of more than the last step, so that no scale fits all of them."""
        return any(self.reducer.stores) and self.step - self.skips.total != 1

    def drop_residuals(self) -> None:
        """Forget what is kept back, and evaluate thresholds anew."""
        for store in self.reducer.stores:
            store.load_state_dict({})
        self.buckets.forget_tracking()

    def rescale(self, factor: float) -> None:
        """Multiply residuals and velocities by this, and evaluate thresholds anew."""
        for store in self.reducer.stores:
            store.load_state_dict({name: part * factor for name, part in store.state_dict().items()})
        self.buckets.forget_tracking()

    # Steps that do not come to their end.

    def abandon(self, overwritten: bool = False) -> None:
        """Roll the step back after an error in backward: what buckets have sent returns to their residuals.

        What their memory held is lost if it was `overwritten` by the next gradients, which are left as they are.
        A rank that did so alone, or after another bucket, would mix its next sums with those of this step.
        """
        agree(self.everyone, {"step to abandon": self.step, "buckets handed in": self._handed})
        self.everyone.pop_traffic()
        if overwritten:
            self._dense.drop_overwritten()
        else:
            self._finish_dense()
        self._roll_back(overwritten)
        if self.local is not None:
            self.local.abandon()

    def give_up(self) -> None:
        """Roll the step back when other ranks will not answer any more."""
        self._dense.cancel()
        self._roll_back()

    def _roll_back(self, overwritten: bool = False) -> None:
        if self._device is not None:
            self._device.drop(keep=not overwritten)
        while self._results:
            self.reducer.rollback(self._results.pop(), overwritten)
        for handed in self._waiting:
            if not overwritten:
                self.reducer.keep(handed)
        self._forget()

    def _forget(self) -> None:
        self._results, self._events, self._waiting, self._handed = [], [], [], 0
        self._digests, self._compare_digests = [], None
        self._report.names = None

    def _state_of(self, bucket: Bucket, grad: Tensor) -> BucketState:
        """The state of a bucket. A new one is made by all ranks together, which check that they mean the same."""
        state = self.buckets.states.get(bucket)
        if state is not None and state.index == self._handed and state.always_dense.device == grad.device:
            return state
        if not grad.is_floating_point():
            raise ValueError(
                f"unsupported gradient dtype {grad.dtype} in {bucket}; expected a floating-point dtype"
            )
        terms = {"step": self.step, "bucket": self._handed, "parameters": bucket.names, "sizes": bucket.sizes}
        terms |= {"density of the step": "dense" if self.density is None else self.density, "dtype": grad.dtype}
        agree(self.meter, terms | self.settings.terms())
        always = [
            torch.arange(place.start, place.stop)
            for name, place in bucket.places.items()
            if self.settings.always_dense(name, place.stop - place.start)
        ]
        entries = torch.cat(always) if always else torch.empty(0, dtype=torch.int64)
        norm = 0.0 if state is None else state.residual_norm
        return self.buckets.add(BucketState(bucket, self._handed, entries.to(grad.device), norm))
