"""Remove the labs of this process before it ends, on exit or by a signal."""

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
    """A lab that must be closed before its process ends."""

    def close(self) -> None: ...


live_labs: set[Closable] = set()
"""The labs of this process that must be removed."""
_hold_lock, _holders, _held = threading.RLock(), 0, set[int]()


def _close_all() -> None:
    with contextlib.ExitStack() as labs:
        for lab in list(live_labs):
            labs.callback(lab.close)


def _forget_all() -> None:
    global _holders
    _holders = 0
    live_labs.clear()


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Remove the labs, then raise the signal again with its default action."""
    if _holders:
        _held.add(number)
        return
    _close_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Delay signals until the end of this block, while the list of what to remove is incomplete."""
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
    """Handle the signals that would end this process at once, or restore their default."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python only allows it there; the next lab cleans up
    old, new = (signal.SIG_DFL, _on_signal) if watch else (_on_signal, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is old:
            signal.signal(number, new)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
