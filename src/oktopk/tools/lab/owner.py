"""The end of the owner: its labs are removed first, whether it exits or a signal ends it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol


class Closable(Protocol):
    """A lab, as far as its owner's end is concerned."""

    def close(self) -> None: ...


live: set[Closable] = set()
"""The labs of this process that have to be removed."""
_hold_lock, _holders, _held = threading.RLock(), 0, set[int]()


def _abandon() -> None:
    with contextlib.ExitStack() as labs:
        for lab in list(live):
            labs.callback(lab.close)


def _disown() -> None:
    global _holders
    _holders = 0
    live.clear()


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Remove the labs, then die of the signal."""
    if _holders:
        _held.add(number)
        return
    _abandon()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """A signal waits for the end of this block: in its middle nobody knows what there is to remove."""
    global _holders
    with _hold_lock:
        _holders += 1
    try:
        yield
    finally:
        with _hold_lock:
            _holders -= 1
        while _held and not _holders:
            os.kill(os.getpid(), _held.pop())


def watch_signals(watch: bool) -> None:
    """Take over the signals that would end this process at once, or give them back."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows it there only; the next lab sweeps
    old, new = (signal.SIG_DFL, _on_signal) if watch else (_on_signal, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is old:
            signal.signal(number, new)


atexit.register(_abandon)
os.register_at_fork(after_in_child=_disown)
