"""MLflow: the metrics of every step in a run."""

from __future__ import annotations

import errno
import time

from .base import requires
from .trackers import TrackerSink

with requires("mlflow", extra="mlflow"):
    import mlflow
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

MOST = 1000
"""Metrics of one request: MLflow takes no more."""
FLUSH_AFTER = 10.0
"""Seconds after which a request is made though more would fit: a request takes longer than a small step."""


class MlflowSink(TrackerSink):
    """Writes oktopk/density/local_density and so on to a run of MLflow, some steps at a time.

    Where the run is, and whether that is online, is up to mlflow.set_tracking_uri(). An error of MLflow, such as a
    server that cannot be reached, switches the sink off, with a warning. Closing the sink writes what is left, and
    does not end the run.

    Args:
        run_id: the run; by default the active run of this thread. A rank other than the first needs none.
        every: write every that many steps.

    Example:
        ::

            from oktopk.integrations.mlflow import MlflowSink
            state = oktopk.OkTopkState(density=0.01, sinks=[MlflowSink()]).register(ddp_model, optimizer)
    """

    def __init__(self, run_id: str | None = None, every: int = 1) -> None:
        active = mlflow.active_run()  # here: it belongs to the thread, and steps may end in another one
        run_id = run_id or (active.info.run_id if active else None)
        super().__init__(run_id, every, "call mlflow.start_run()")
        self._client = mlflow.MlflowClient() if run_id else None
        self._waiting: list[Metric] = []
        self._sent_at = time.monotonic()

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        self._waiting += [Metric(name, value, now, step) for name, value in scalars.items()]
        if len(self._waiting) + len(scalars) > MOST or time.monotonic() - self._sent_at > FLUSH_AFTER:
            self._send()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        waiting, self._waiting = self._waiting, []
        if self._client is None or not waiting:
            return
        try:
            self._client.log_batch(self.run, metrics=waiting)
        except MlflowException as error:
            raise OSError(errno.EIO, f"MLflow: {error}") from error  # which switches the sink off

    def _close(self) -> None:
        self._send()
