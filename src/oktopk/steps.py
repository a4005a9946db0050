"""All buckets of a step: dense or sparse, and lost together when something is not finite."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .accumulator import Accumulator
from .algorithms import Dense
from .choice import Calendar, decide
from .comm import Communicator, Metered, agree, gather_json
from .errors import NonFiniteError
from .lane import Inspect, Lane, LaneReducer, Settled
from .layout import Bucket
from .metrics import DENSE, SPARSE, MetricsSink, ReductionEvent, StepEvent, combine
from .settings import Settings
from .sparse import all_finite

_log = logging.getLogger(__name__)

_NAMED = 5
"""How many parameters a rank names when it reports numbers that are not finite."""
_TIMED_DENSE_STEPS = 4


class _Waiting(NamedTuple):
    lane: Lane
    grad: Tensor
    scale: float | None
    density: float


class StepReducer:
    """Reduces one bucket after the other, always from one thread and in the same order on all ranks."""

    def __init__(
        self,
        settings: Settings,
        comm: Communicator,
        sinks: Iterable[MetricsSink] = (),
        unused_stay: bool = False,
    ) -> None:
        self.settings = settings
        self.meter = Metered(comm)
        self.sinks = list(sinks)
        self.step = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.reducer = LaneReducer(settings, self.meter, unused_stay)
        self.lanes: dict[Bucket, Lane] = {}
        self.last: StepEvent | None = None
        self._handed = 0
        """Buckets of this step so far."""
        self._waiting: list[_Waiting] = []
        """Sparse ones that are not reduced yet: they will share messages."""
        self._settled: list[Settled] = []
        self._events: list[ReductionEvent] = []
        self._said_dense = False
        self._culprits: list[str] | None = None
        """Set when a bucket of this step was not finite: where, as far as this rank knows."""

    @torch.no_grad()
    def reduce(self, bucket: Bucket, grad: Tensor, scale: float | None = None) -> None:
        """The mean over ranks of `grad` (1-D), in its place after finish(). A GradScaler may have scaled it."""
        lane = self._lane(bucket, grad)
        self._handed += 1
        density = self._density(lane)
        if self._culprits is not None:
            phase = DENSE if density is None else SPARSE
            self._note([lane], *self.reducer.untouched(lane, grad, scale, phase, self.step))
        elif density is None:
            alone = self.reducer.residuals.peek(bucket) is None  # then the sum overwrites this rank's own
            inspect = self._name_culprits([lane], "the sum over ranks" if alone else f"rank {self.meter.rank}")
            self._note([lane], *self.reducer.dense(lane, grad, scale, self.step, inspect))
        else:
            if self._waiting and self._waiting[0].grad.device != grad.device:
                self._reduce_waiting()
            self._waiting.append(_Waiting(lane, grad, scale, density))
            if sum(one.lane.free * one.density for one in self._waiting) >= self.settings.join:
                self._reduce_waiting()

    def _reduce_waiting(self) -> None:
        """Reduce the sparse buckets that have come in since the last time, with messages that they share."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._culprits is not None:
            for one in waiting:
                self._note([one.lane], *self.reducer.untouched(one.lane, one.grad, one.scale, SPARSE, self.step))
            return
        lanes, last = [one.lane for one in waiting], waiting[-1]
        inspect = self._name_culprits(lanes, f"rank {self.meter.rank}")
        settled, event = self.reducer.sparse(
            lanes, [one.grad for one in waiting], last.scale, last.density, self.step, inspect
        )
        self._note(lanes, settled, event)

    def _note(self, lanes: Sequence[Lane], settled: Settled | Sequence[Settled], event: ReductionEvent) -> None:
        self._settled += [settled] if isinstance(settled, Settled) else settled
        self._events.append(event)
        if self._culprits is None:  # a lost reduction ends early: its time tells nothing
            size = sum(lane.bucket.size for lane in lanes)
            for lane in lanes:
                share = lane.bucket.size / size if size else 1.0
                lane.choice.note(event.phase == DENSE, share * (event.stop - event.start))

    @torch.no_grad()
    def finish(self, start: float, handed_over: float) -> StepEvent:
        """Settle the step: hand out the results of all buckets or of none, and tell the sinks."""
        self._reduce_waiting()
        skipped = self._culprits is not None
        culprits = self._share_culprits() if skipped else ()
        for settled in self._settled:
            if skipped:
                self.reducer.put_back(settled)
            else:
                self.reducer.hand_out(settled)
        reductions = [replace(event, skipped=skipped) for event in self._events]
        self._compare_ways([settled.lane for settled in self._settled])
        self._forget()
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        event = self.last = combine(
            self.step, reductions, skipped=skipped, culprits=culprits,
            start=start, handed_over=handed_over, stop=time.perf_counter(),
        )  # fmt: skip
        self.step += 1
        for sink in self.sinks:
            sink.emit(event)
        if skipped:
            self._complain(event)
        return event

    def abandon(self) -> None:
        """Take the step back after an error: what buckets have sent returns to their residuals."""
        while self._settled:
            self.reducer.put_back(self._settled.pop())
        for one in self._waiting:
            self.reducer.keep(one.lane, one.grad, one.scale)
        self._forget()

    def _forget(self) -> None:
        self._settled, self._events, self._waiting, self._handed, self._culprits = [], [], [], 0, None

    # Numbers that are not finite.

    def _name_culprits(self, lanes: Sequence[Lane], where: str) -> Inspect:
        def look(acc: Accumulator) -> None:
            found = [
                f"{self._seen_in(lane, name, where)}: {name}"
                for lane, values in zip(lanes, acc.pieces(), strict=True)
                for name, place in lane.bucket.places.items()
                if not all_finite(values[place])
            ]
            self._culprits = found[:_NAMED]
            if len(found) > _NAMED:
                self._culprits.append(f"{where}: {len(found) - _NAMED} more")

        return look

    def _seen_in(self, lane: Lane, name: str, where: str) -> str:
        place = lane.bucket.places[name]
        dense = self.settings.always_dense(name, place.stop - place.start)
        return "the sum over ranks" if dense else where

    def _share_culprits(self) -> tuple[str, ...]:
        """Everybody's, the same on all ranks."""
        heard = gather_json(self.meter, self._culprits, "not finite")
        named = tuple(dict.fromkeys(text for texts in heard for text in texts))
        return named or ("the sum over ranks, which overflows",)

    def _complain(self, event: StepEvent) -> None:
        where = ", ".join(event.culprits)
        if self.meter.rank == 0:
            _log.warning("oktopk: step %d skipped on all ranks, not finite: %s", event.step, where)
        if self.skipped_in_a_row >= self.settings.max_skipped:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} steps in a row had gradients that are not finite; the last was step "
                f"{event.step}: {where}. Lower the learning rate, clip gradients or look at the data; max_skipped "
                "sets how many are tolerated"
            )

    # Which way a bucket goes.

    def _lane(self, bucket: Bucket, grad: Tensor) -> Lane:
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
        known = lane or Lane(bucket, index, entries)
        moved = set(bucket.names)
        self.lanes = {old: other for old, other in self.lanes.items() if moved.isdisjoint(old.names)}
        self.lanes[bucket] = replace(known, index=index, always_dense=entries.to(grad.device))
        return self.lanes[bucket]

    @property
    def _calendar(self) -> tuple[int, Calendar]:
        done = self.step - self.settings.warmup_steps - self.settings.ramp_steps
        return done, Calendar(max(0, _TIMED_DENSE_STEPS - self.settings.warmup_steps))

    def _density(self, lane: Lane) -> float | None:
        """None when the bucket goes dense in this step."""
        density = self.settings.schedule.density_at(self.step)
        if isinstance(self.settings.algorithm, Dense) or lane.never_sparse:
            return None
        done, calendar = self._calendar
        if density is None or not self.settings.auto or done < 0:
            return density
        goes_dense = lane.choice.goes_dense(done, calendar)
        if calendar.window(done)[0] == 0:
            lane.choice.start_trial(goes_dense)
        return None if goes_dense else density

    def _compare_ways(self, lanes: Sequence[Lane]) -> None:
        done, calendar = self._calendar
        if not self.settings.auto or isinstance(self.settings.algorithm, Dense) or not calendar.decides(done):
            return
        lanes = [lane for lane in lanes if not lane.never_sparse]
        decide(self.meter, [lane.choice for lane in lanes])
        if self.meter.rank == 0:
            self._tell_ways(lanes)

    def _tell_ways(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            dense, sparse = (1e3 * seconds for seconds in lane.choice.agreed)
            way = DENSE if lane.choice.dense else SPARSE
            _log.info("oktopk: bucket %d goes %s: %.3g ms dense, %.3g ms sparse", lane.index, way, dense, sparse)
        if lanes and all(lane.choice.dense for lane in lanes) and not self._said_dense:
            self._said_dense = True
            dense, sparse = (1e3 * sum(lane.choice.agreed[way] for lane in lanes) for way in (0, 1))
            _log.warning(
                "oktopk: all buckets stay dense, which is faster here: %.3g ms a step against %.3g ms sparse; "
                "auto=False goes sparse all the same", dense, sparse,
            )  # fmt: skip
