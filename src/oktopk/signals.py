"""Being asked to end while others do the work."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def passing_on(processes: Sequence[Popen[bytes]]) -> Iterator[list[signal.Signals]]:
    """Ctrl-C, SIGTERM and the end of the terminal go on to the processes that run; the list has those that came.

    A process should have a session of its own, so that a Ctrl-C reaches it once: a second one would not let it
    save.
    """
    came: list[signal.Signals] = []

    def pass_on(number: int, _: object) -> None:
        came.append(signal.Signals(number))
        for process in processes:
            ask_to_end(process, came[-1])

    heeded = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]  # as nohup wants it
    before = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ask_to_end(process: Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM if number is signal.SIGHUP else number)
