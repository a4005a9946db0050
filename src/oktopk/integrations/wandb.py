"""Weights & Biases: the metrics of every step in a run."""

from __future__ import annotations

from typing import Any

from .base import requires
from .trackers import TrackerSink

with requires("wandb", extra="wandb"):
    import wandb

STEP = "oktopk/step"
"""The axis of the curves: wandb's own counts calls of log()."""


class WandbSink(TrackerSink):
    """Writes oktopk/density/local_density and so on, with oktopk/step as their axis, to a run of wandb.

    Online or offline is the run's own mode. Closing the sink does not finish the run.

    Args:
        run: the run; by default that of wandb.init(). A rank other than the first needs none.
        every: write every that many steps.
        commit: log rows of their own. Give False if the script logs with `wandb.log(…, step=…)`, because wandb
            drops rows whose step is behind: figures then wait for the script's next row, which gets the newest.

    Example:
        ::

            from oktopk.integrations.wandb import WandbSink
            state = oktopk.OkTopkState(density=0.01, sinks=[WandbSink()]).register(ddp_model, optimizer)
    """

    def __init__(self, run: Any = None, every: int = 1, commit: bool = True) -> None:
        super().__init__(run or wandb.run, every, "call wandb.init()")
        self._commit = commit
        if self.run is not None:
            self.run.define_metric(STEP, hidden=True)
            self.run.define_metric("oktopk/*", step_metric=STEP)

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log({STEP: step, **scalars}, commit=self._commit)
