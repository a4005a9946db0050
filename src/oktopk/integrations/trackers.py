"""What the sinks for experiment trackers share: the run of this rank, and the curves of a step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.distributed as dist

from ..errors import OkTopkError
from ..metrics.events import StepEvent
from ..metrics.sinks import Sink
from ..metrics.sinks.tensorboard import step_scalars


class TrackerSink(Sink):
    """Writes the curves of TensorBoardSink, below "oktopk/", to a run that the script has begun.

    A rank other than the first that has no run, as usual, writes nothing.

    Args:
        run: the run, or None.
        every: write every that many steps.
        how_to_begin: what a script must call to begin a run.
    """

    def __init__(self, run: Any, every: int, how_to_begin: str) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        super().__init__()
        self.run, self.every, self._how_to_begin = run, every, how_to_begin

    def _write(self, event: StepEvent) -> None:
        if event.step % self.every:
            return
        if self.run is not None:
            scalars = {f"oktopk/{name}": float(x) for name, x in step_scalars(event).items() if x is not None}
            self._log(event.step, scalars)
        elif not dist.is_initialized() or dist.get_rank() == 0:
            raise OkTopkError(f"{type(self).__name__} has no run: {self._how_to_begin} before making the sink")

    @abstractmethod
    def _log(self, step: int, scalars: dict[str, float]) -> None: ...
