"""Which way the buckets of a step go, dense or sparse: by the schedule and, with `auto`, by the clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..algorithms import Dense
from ..comm import Communicator
from ..metrics.events import DENSE, SPARSE, ReductionEvent
from .bucket_state import BucketState
from .choice import Calendar, Choice, decide
from .settings import Settings

_log = logging.getLogger(__name__)

_TIMED_DENSE_STEPS = 4


class Ways:
    """The same on all ranks: by the number of the step, and by decisions that they take together.

    What counts for `auto` is how long whole steps take: a dense sum may be hidden behind backward where a faster
    sparse exchange is not. Times of single buckets decide which of them go dense in a step that pays.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._schedule = settings, settings.schedule
        self._calendar = Calendar(max(0, _TIMED_DENSE_STEPS - settings.warmup_steps))
        self._may_go_sparse = not isinstance(settings.algorithm, Dense)
        self.whole = Choice()
        """Of steps in which all buckets went the same way."""
        self._said_dense = False

    def surely_sparse(self, step: int) -> bool:
        """Whether a step goes sparse, however long it takes."""
        return self._may_go_sparse and not self._settings.auto and self._schedule.density_at(step) is not None

    def density(self, lane: BucketState, step: int) -> float | None:
        """None when the bucket goes dense in this step."""
        density = self._schedule.density_at(step) if self._may_go_sparse and not lane.never_sparse else None
        done = self._done(step)
        if density is None or not self._settings.auto or done < 0:
            return density
        goes_dense = lane.choice.goes_dense(done, self._calendar)
        if self._calendar.window(done)[0] == 0:
            lane.choice.start_trial(goes_dense)
        return None if goes_dense else density

    def time_step(
        self, lanes: Sequence[BucketState], reductions: Sequence[ReductionEvent], start: float, step: int
    ) -> None:
        """Note how long a step took, from its first bucket on, if all buckets that may go sparse went one way."""
        if not self._settings.auto:
            return
        fixed = {lane.index for lane in lanes if lane.never_sparse}
        ways = {event.phase for event in reductions if event.bucket not in fixed}
        if len(ways) == 1:
            self._note(ways == {DENSE}, self.seconds(reductions, start), step)

    def time_dense(self, lane: BucketState, reduced: float, whole: float, step: int) -> None:
        """The same of a step that was nothing but the dense sum of one bucket, which took `reduced` seconds."""
        lane.choice.note(True, reduced)
        if self._settings.auto and not lane.never_sparse:
            self._note(True, whole, step)

    def _note(self, dense: bool, seconds: float, step: int) -> None:
        if self._calendar.window(self._done(step))[0] == 0:
            self.whole.start_trial(dense)
        self.whole.note(dense, seconds)

    @staticmethod
    def seconds(reductions: Sequence[ReductionEvent], start: float) -> float:
        return time.perf_counter() - start

    def decides(self, step: int) -> bool:
        """Whether ranks compare the ways after this step."""
        return self._settings.by_the_clock and self._calendar.decides(self._done(step))

    def decide(self, comm: Communicator, lanes: Sequence[BucketState], step: int) -> None:
        lanes = [lane for lane in lanes if not lane.never_sparse]
        tried = {lane.choice.goes_dense(self._done(step), self._calendar) for lane in lanes}
        decide(comm, [self.whole, *(lane.choice for lane in lanes)])
        if len(tried) == 1 and 0.0 not in self.whole.agreed:
            alike = self.whole.dense or all(lane.choice.dense for lane in lanes)
            for lane in lanes if alike else ():
                lane.choice.dense = self.whole.dense
        if comm.rank == 0:
            self._tell(lanes)

    def _done(self, step: int) -> int:
        """Steps of the sparse phase, in which both ways are tried; negative before it."""
        return step - self._settings.warmup_steps - self._settings.ramp_steps

    def _tell(self, lanes: Sequence[BucketState]) -> None:
        for lane in lanes:
            dense, sparse = (1e3 * seconds for seconds in lane.choice.agreed)
            way = DENSE if lane.choice.dense else SPARSE
            _log.info("oktopk: bucket %d goes %s: %.3g ms dense, %.3g ms sparse", lane.index, way, dense, sparse)
        if lanes and all(lane.choice.dense for lane in lanes) and not self._said_dense:
            self._said_dense = True
            dense, sparse = (1e3 * sum(lane.choice.agreed[way] for lane in lanes) for way in (0, 1))
            if 0.0 not in self.whole.agreed:
                dense, sparse = (1e3 * seconds for seconds in self.whole.agreed)
            _log.warning(
                "oktopk: all buckets stay dense, which is faster here: %.3g ms a step against %.3g ms sparse; "
                "auto=False goes sparse all the same", dense, sparse,
            )  # fmt: skip
