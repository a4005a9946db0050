"""What all sinks share: they close once, and take nothing after that."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TypeVar

from ...errors import OkTopkError
from ..events import StepEvent

S = TypeVar("S", bound="Sink")


class Sink(ABC):
    """A sink says what to do with an event (`_write`) and, if it holds something, how to let go (`_finish`)."""

    def __init__(self) -> None:
        self._closed = False
        self._lock = threading.Lock()  # a worker thread emits, the main thread closes

    def emit(self, event: StepEvent) -> None:
        with self._lock:
            if self._closed:
                raise OkTopkError(f"{type(self).__name__} is closed: it cannot take step {event.step}")
            self._write(event)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._finish()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _write(self, event: StepEvent) -> None: ...

    def _finish(self) -> None:  # noqa: B027 - a sink in memory has nothing to let go
        pass
