"""The three lists on a trainer: sparsities, compression_ratios, communication_sizes."""

from __future__ import annotations

import logging

from ..events import StepEvent
from .base import Sink

log = logging.getLogger(__name__)

LISTS = ("sparsities", "compression_ratios", "communication_sizes")


class TrainerLists(Sink):
    """Appends one entry per step to each of the trainer's lists, in both phases, and makes the lists it lacks.

    The trainer may reset them between steps, by a new list or in place. The lists always are of one length: if
    it resets only some of them, the others lose the entries of the same steps.
    """

    def __init__(self, trainer: object) -> None:
        super().__init__()
        self.trainer = trainer
        self._announced = False
        self._lists()

    def _write(self, event: StepEvent) -> None:
        volume = event.volume
        lists = self._lists()
        entries = (volume.sparsity, volume.ratio, volume.payload_bytes)
        for values, entry in zip(lists, entries, strict=True):
            values.append(entry)
        if not self._announced:
            self._announced = True
            log.info(
                "metrics reach the %s: step %d (%s) has sparsity %.6f, compression ratio %.2f, %d bytes",
                type(self.trainer).__name__,
                event.step,
                event.phase,
                *entries,
            )

    def _lists(self) -> list[list[float]]:
        """The trainer's lists of now, cut to the newest entries that all of them have."""
        lists = [self._list(name) for name in LISTS]
        length = min(map(len, lists))
        for name, values in zip(LISTS, lists, strict=True):
            if len(values) > length:
                log.debug("%s loses %d entries that the other lists lack", name, len(values) - length)
                del values[: len(values) - length]
        return lists

    def _list(self, name: str) -> list[float]:
        values = getattr(self.trainer, name, None)
        if values is None:
            values = []
            try:
                setattr(self.trainer, name, values)
            except AttributeError as error:
                kind = type(self.trainer).__name__
                raise TypeError(
                    f"a trainer takes metrics in {name}, but {kind} cannot have it: {error}"
                ) from error
        if not isinstance(values, list):
            raise TypeError(f"{type(self.trainer).__name__}.{name} must be a list, got {type(values).__name__}")
        return values
