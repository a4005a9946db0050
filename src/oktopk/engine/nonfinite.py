"""Numbers that are not finite: which parameters had them, as each rank can tell, and as all ranks are told."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..comm import Communicator, gather_json
from ..errors import NonFiniteError
from ..feedback.accumulator import Accumulator
from ..metrics.events import StepEvent
from .bucket_reducer import Inspect
from .bucket_state import BucketState, not_finite
from .dense_allreduce import Posted
from .settings import Settings

_log = logging.getLogger(__name__)

_NAMED = 5
"""How many parameters a rank names."""
_SUM = "the sum over ranks"
"""Where something was that may have come from any of them."""


class NonFiniteReport:
    """Of one step, on one rank: where something was not finite, as far as this rank knows."""

    def __init__(self, settings: Settings, here: str) -> None:
        self._settings, self._here = settings, here
        self.named: list[str] | None = None
        """Set when a bucket of this step was lost."""

    def in_dense(self, lane: BucketState, alone: bool) -> Inspect:
        """Looks at a bucket that went dense; `alone` if the sum has overwritten what this rank had."""
        return self._look([lane], _SUM if alone else self._here)

    def in_posted(self, one: Posted) -> Inspect:
        """The same for a sum that was begun by the hook, which has looked already unless the sum is not marked."""
        found = one.found
        if found is None:
            return self.in_dense(one.lane, alone=True)  # with a residual it would be float32, and marked
        return lambda acc: self._name([f"{self._here}: {name}" for name in found], self._here)

    def in_sparse(self, lanes: Sequence[BucketState]) -> Inspect:
        """Looks at buckets that went sparse together. Of what always goes dense only the sum is seen."""
        return self._look(lanes, self._here)

    def _look(self, lanes: Sequence[BucketState], where: str) -> Inspect:
        def look(acc: Accumulator) -> None:
            found = [
                f"{_SUM if self._always_dense(lane, name) else where}: {name}"
                for lane, values in zip(lanes, acc.pieces(), strict=True)
                for name in not_finite(lane, values)
            ]
            self._name(found, where)

        return look

    def _always_dense(self, lane: BucketState, name: str) -> bool:
        place = lane.bucket.places[name]
        return self._settings.always_dense(name, place.stop - place.start)

    def _name(self, found: list[str], where: str) -> None:
        more = [f"{where}: {len(found) - _NAMED} more"] if len(found) > _NAMED else []
        self.named = found[:_NAMED] + more

    def forget(self) -> None:
        """The next step begins."""
        self.named = None

    def shared(self, comm: Communicator) -> tuple[str, ...]:
        """Everybody's, the same on all ranks."""
        heard = gather_json(comm, self.named, "not finite")
        return tuple(dict.fromkeys(text for texts in heard for text in texts)) or (f"{_SUM}, which overflows",)


def complain(event: StepEvent, in_a_row: int, most: int, aloud: bool) -> None:
    """Log that a step was skipped, and raise once so many were."""
    where = ", ".join(event.culprits)
    if aloud:
        _log.warning("oktopk: step %d skipped on all ranks, not finite: %s", event.step, where)
    if in_a_row >= most:
        raise NonFiniteError(
            f"{in_a_row} steps in a row had gradients that are not finite; the last was step {event.step}: "
            f"{where}. Lower the learning rate, clip gradients or look at the data; max_skipped sets how many are "
            "tolerated"
        )
