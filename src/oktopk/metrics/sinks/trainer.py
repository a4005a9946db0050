"""Three lists on a trainer object: sparsities, compression_ratios, communication_sizes."""

from __future__ import annotations

import logging

from ..events import StepEvent
from .base import Sink

log = logging.getLogger(__name__)

LISTS = ("sparsities", "compression_ratios", "communication_sizes")


class TrainerLists(Sink):
    """Appends one entry per step, dense or sparse, to each of three lists on a trainer.

    Creates missing lists. The trainer may replace or clear the lists between steps. They always have the same
    length: if the trainer clears one of them, the others drop their oldest entries.

    Args:
        trainer: Any object with, or that accepts, the attributes sparsities, compression_ratios and
            communication_sizes (bytes).

    Raises:
        TypeError: The trainer has no room for a list, or the attribute is not a list.
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
                "recording metrics on the %s: step %d (%s) has sparsity %.6f, compression ratio %.2f, %d bytes",
                type(self.trainer).__name__,
                event.step,
                event.phase,
                *entries,
            )

    def _lists(self) -> list[list[float]]:
        """The trainer's lists, shortened to the newest entries that all of them have."""
        lists = [self._list(name) for name in LISTS]
        length = min(map(len, lists))
        for name, values in zip(LISTS, lists, strict=True):
            if len(values) > length:
                log.debug("%s: dropped %d entries that the other lists lack", name, len(values) - length)
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
                raise TypeError(f"cannot record metrics in {kind}.{name}: {error}") from error
        if not isinstance(values, list):
            raise TypeError(f"{type(self.trainer).__name__}.{name} must be a list, got {type(values).__name__}")
        return values
