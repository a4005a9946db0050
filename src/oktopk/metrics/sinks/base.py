"""The base class of the sinks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from ...errors import OkTopkError
from ..events import MetricsSink, StepEvent
from .switch import Switch

S = TypeVar("S", bound="Sink")


class Sink(ABC):
    """Closes once and refuses events after that. Also a context manager that closes at the end.

    A sink that meets a full or failing disk is switched off with a warning; training continues. Errors of other
    kinds are raised. A subclass implements _write() and, if it holds a resource, _close().
    """

    def __init__(self) -> None:
        self._closed = False
        self._switch = Switch(type(self).__name__)
        # A worker thread emits, the main thread closes; a signal may close in the very thread that emits.
        self._lock = threading.RLock()

    def emit(self, event: StepEvent) -> None:
        """Record one step."""
        with self._lock:
            if self._closed:
                raise OkTopkError(f"{type(self).__name__} is closed: cannot record step {event.step}")
            self._switch.run(lambda: self._write(event))

    def note(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:  # noqa: B027 - most have no place
        """Record something else than a step: "run" (what it is), "decision" (of auto), "end"."""

    def close(self) -> None:
        """Release files and other resources. Further calls do nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._switch.close(self._close)

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _write(self, event: StepEvent) -> None: ...

    def _close(self) -> None:  # noqa: B027 - a sink in memory has nothing to close
        pass


class OtherSink(Sink):
    """A sink of another kind: any object with emit() and close()."""

    def __init__(self, sink: MetricsSink) -> None:
        super().__init__()
        self._sink, self._switch.name = sink, type(sink).__name__

    def _write(self, event: StepEvent) -> None:
        self._sink.emit(event)

    def _close(self) -> None:
        self._sink.close()


def as_sink(sink: MetricsSink) -> Sink:
    """The sink itself, or a Sink around it: one that meets a full disk must not end the job."""
    return sink if isinstance(sink, Sink) else OtherSink(sink)
