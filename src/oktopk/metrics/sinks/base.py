"""The base class of the sinks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TypeVar

from ...errors import OkTopkError
from ..events import StepEvent

S = TypeVar("S", bound="Sink")


class Sink(ABC):
    """Closes once and refuses events after that. Also a context manager that closes at the end.

    A subclass implements _write() and, if it holds a resource, _close().
    """

    def __init__(self) -> None:
        self._closed = False
        self._lock = threading.Lock()  # a worker thread emits, the main thread closes

    def emit(self, event: StepEvent) -> None:
        """Record one step."""
        with self._lock:
            if self._closed:
                raise OkTopkError(f"{type(self).__name__} is closed: cannot record step {event.step}")
            self._write(event)

    def close(self) -> None:
        """Release files and other resources. Further calls do nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _write(self, event: StepEvent) -> None: ...

    def _close(self) -> None:  # noqa: B027 - a sink in memory has nothing to close
        pass
