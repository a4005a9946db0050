"""Non-finite gradients: which parameters held them, on which rank, and what becomes of the step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ..comm import Communicator, gather_json
from ..errors import NonFiniteError, WireError
from ..feedback.accumulator import Accumulator
from ..metrics.events import StepEvent
from .bucket_state import BucketState
from .settings import Settings

_log = logging.getLogger(__name__)

_NAMED = 5
"""How many parameters a rank names."""
_SUM = "the sum over ranks"
"""Where a non-finite number was that may have come from any rank."""


class NonFiniteReport:
    """Of one step, on one rank: where numbers were not finite, as far as this rank knows."""

    def __init__(self, settings: Settings, here: str) -> None:
        self._settings, self._here = settings, here
        self.names: list[str] | None = None
        """Set if the step is lost, which all ranks know at the same point."""

    def add(self, parameters: Iterable[str]) -> None:
        """Lose the step because of these parameters of this rank: none, if another rank has found something."""
        self._set([f"{self._here}: {name}" for name in parameters])

    def add_sum(self, state: BucketState, values: Tensor) -> None:
        """Lose the step because of the sum of a bucket over ranks."""
        self._set([f"{_SUM}: {name}" for name in state.nonfinite(values)])

    def inspect(self, states: Sequence[BucketState], acc: Accumulator) -> None:
        """Lose the step because of buckets that were reduced together, and look for the reason.

        Of entries that are always dense only the sum is known.
        """
        self._set([
            f"{_SUM if self._always_dense(state, name) else self._here}: {name}"
            for state, values in zip(states, acc.pieces(), strict=True)
            for name in state.nonfinite(values)
        ])  # fmt: skip

    def _always_dense(self, state: BucketState, name: str) -> bool:
        place = state.bucket.places[name]
        return self._settings.always_dense(name, place.stop - place.start)

    def _set(self, found: list[str]) -> None:
        if self.names is not None:  # by a bucket that was exchanged before this one
            return
        more = [f"{self._here}: {len(found) - _NAMED} more"] if len(found) > _NAMED else []
        self.names = found[:_NAMED] + more

    def gather(self, comm: Communicator) -> tuple[str, ...]:
        """The names that all ranks have, the same on all of them."""
        gathered = gather_json(comm, self.names, "not finite")
        for rank, texts in enumerate(gathered):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                who = comm.global_rank(rank)
                raise WireError(f"all_gather (not finite): rank {who} sent something else than names")
        return tuple(dict.fromkeys(text for texts in gathered for text in texts)) or (f"{_SUM}, which overflows",)


class SkippedSteps:
    """Counts the steps that were skipped, logs them on one rank, and raises if there are too many in a row.

    Args:
        most: how many in a row are an error.
        speaks: whether this rank logs.
    """

    def __init__(self, most: int, speaks: bool) -> None:
        self._most, self._speaks = most, speaks
        self.total = 0
        self.in_a_row = 0
        self._late_in_a_row = 0
        """Of those that the host learned of a step later."""
        self.may_be_scaled = False
        """Whether a GradScaler may be at work that is not known yet."""
        self._quiet: list[StepEvent] = []
        """Those that were skipped while it may have been."""

    def record(self, event: StepEvent, scale: float | None) -> None:
        """Count a step, skipped or not, whose gradients had this scale of a GradScaler."""
        self.total += event.skipped
        self.in_a_row = self.in_a_row + 1 if event.skipped else 0
        if event.skipped:
            self._log(event, scale, routine=self.may_be_scaled or (scale is not None and scale > 1))
            if self.may_be_scaled:
                self._quiet.append(event)
            _check_skipped(event, self.in_a_row, self._most, scale)

    def record_late(self, step: int, skipped: bool, last: StepEvent | None) -> None:
        """Count a step that a device has decided on, after the host has recorded it as its `last` one."""
        self._late_in_a_row = self._late_in_a_row + 1 if skipped else 0
        if skipped and last is not None and not last.skipped:
            self.total += 1
            event = replace(last, step=step, culprits=("a gradient of some rank",))
            self._log(event, None, routine=False)
            _check_skipped(event, self._late_in_a_row, self._most, None)

    def end_quiet(self) -> None:
        """No GradScaler is at work: steps that were skipped before this was known deserve a warning."""
        skipped, self._quiet = self._quiet, []
        for event in skipped:
            self._log(event, None, routine=False)

    def _log(self, event: StepEvent, scale: float | None, routine: bool) -> None:
        if self._speaks:
            _log_skipped(event, scale, routine)


def _log_skipped(event: StepEvent, scale: float | None, routine: bool) -> None:
    """Log that a step was skipped. If a GradScaler's scale is too large, that is `routine`: it is lowered."""
    if routine and scale is not None:
        _log.info("oktopk: step %d skipped: the GradScaler's scale of %g is too large", event.step, scale)
        return
    if routine:
        _log.info("oktopk: step %d skipped: non-finite gradients, as a GradScaler expects at first", event.step)
        return
    _log.warning("oktopk: step %d skipped on all ranks: non-finite gradients in %s", event.step, _where(event))


def _check_skipped(event: StepEvent, in_a_row: int, most: int, scale: float | None) -> None:
    """Raise if `most` steps in a row were skipped."""
    if in_a_row < most:
        return
    scaling = "if a GradScaler scales the loss, pass it as grad_scaler="
    if scale is not None:
        scaling = f"the GradScaler's scale is {scale:g}"
    raise NonFiniteError(
        f"{in_a_row} steps in a row had non-finite gradients; the last was step {event.step}: {_where(event)}. "
        f"Lower the learning rate, clip gradients or check the data; {scaling}; max_skipped sets how many are "
        "tolerated"
    )


def _where(event: StepEvent) -> str:
    return ", ".join(event.culprits)
