"""Stop a run on Ctrl-C or SIGTERM, after the current step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Records the first signal, so that the current step can finish and be saved. A second Ctrl-C interrupts at
    once.

    The old handlers are restored at the end.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
