"""Events as TensorBoard scalars."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ...utils.extras import install_command
from ..events import SPARSE, StepEvent
from .base import Sink
from .flat import Value, flat_reduction, flat_step

STEP_TAGS = {
    "volume": ("sparsity", "compression_ratio", "payload_bytes"),
    "density": ("target_density", "local_density", "global_density"),
    "wire": ("sent_bytes", "received_bytes", "sent_messages", "control_bytes"),
    "time": (
        *("select_seconds", "encode_seconds", "exchange_seconds", "decode_seconds", "wait_seconds"),
        *("other_seconds", "busy_seconds", "exposed_seconds", "hidden_share", "slowest_rank"),
    ),
    "state": ("residual_norm", "skipped"),
}
BUCKET_TAGS = ("local_density", "global_density", "threshold", "residual_norm", "sent_bytes", "busy_seconds")


def step_scalars(event: StepEvent) -> dict[str, Value]:
    """The curves of a step by name, such as density/local_density."""
    row = flat_step(event)
    tags = {f"{group}/{name}": row[name] for group, names in STEP_TAGS.items() for name in names}
    return {"state/sparse_phase": event.phase == SPARSE, **tags}


class TensorBoardSink(Sink):
    """Writes scalars such as volume/sparsity, time/exposed_seconds and bucket 03/threshold.

    state/sparse_phase goes from 0 to 1 at the end of the warm-up.

    Args:
        directory: The log directory of TensorBoard.
        every: Write every that many steps.
        first_step: First step of a resumed run: TensorBoard then hides what the directory has of this and later
            steps.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: The directory cannot be written.

    Example:
        >>> import oktopk, tempfile, torch
        >>> from oktopk.metrics.sinks import TensorBoardSink
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = TensorBoardSink(folder, every=10)
        ...     with oktopk.AllReducer(parameters, density=0.1, sinks=[sink]) as reducer:
        ...         grads = reducer.sync({"w": torch.ones(50)})
    """

    def __init__(self, directory: str | os.PathLike[str], every: int = 1, first_step: int | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        super().__init__()
        self.every = every
        writer, self._summary = _tensorboard()
        self._writer = _open(writer, directory, first_step)
        self._file = _QuietFile.in_place_of(self._writer)

    def _write(self, event: StepEvent) -> None:
        if event.step % self.every:
            return
        scalars = step_scalars(event)
        for reduction in event.reductions:
            row = flat_reduction(reduction)
            scalars |= {f"bucket {reduction.bucket:02d}/{name}": row[name] for name in BUCKET_TAGS}
        self._add(event.step, scalars)

    def add(self, step: int, scalars: Mapping[str, Value]) -> None:
        """Write other scalars, such as the loss."""
        with self._lock:
            self._switch.run(lambda: self._add(step, scalars))

    def _add(self, step: int, scalars: Mapping[str, Value]) -> None:
        self._file.check()
        # One record for all scalars: add_scalar() takes 0.1 ms for each.
        values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items() if x is not None]
        self._writer.file_writer.add_summary(self._summary(value=values), step)

    def _close(self) -> None:
        self._writer.close()
        self._file.check()


class _QuietFile:
    """Keeps the error of a write for the sink: the writer's own thread would print it and die."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._error: OSError | None = None

    @classmethod
    def in_place_of(cls, writer: Any) -> _QuietFile:
        """Take the place of the file of a SummaryWriter."""
        records = writer.file_writer.event_writer._async_writer._writer
        records._writer = cls(records._writer)
        return records._writer  # type: ignore[no-any-return]

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def write(self, data: bytes) -> None:
        if self._error is None:  # nothing can be read behind a record that is incomplete
            self._keep_error(lambda: self._file.write(data))

    def flush(self) -> None:
        self._keep_error(self._file.flush)

    def close(self) -> None:
        self._keep_error(self._file.close)

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def _keep_error(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self._error = error


def _tensorboard() -> tuple[Any, Any]:
    """Import SummaryWriter and Summary."""
    try:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoardSink needs tensorboard: {install_command('train')}") from error
    return SummaryWriter, Summary


def _open(writer: Any, directory: str | os.PathLike[str], first_step: int | None) -> Any:
    try:
        os.makedirs(directory, exist_ok=True)
        return writer(os.fspath(directory), max_queue=100, flush_secs=10, purge_step=first_step)
    except OSError as error:
        message = f"cannot write metrics: {error.strerror}"
        raise OSError(error.errno, message, os.fspath(directory)) from error
