"""Being asked to end: while others do the work, or in the middle of one's own."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal that is not Ctrl-C, or that has ended other processes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupted_code(error: KeyboardInterrupt) -> int:
    """The exit code of a program that was ended so.

    >>> interrupted_code(KeyboardInterrupt()), interrupted_code(Interrupted(signal.SIGTERM))
    (130, 143)
    """
    return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


@contextmanager
def raising(number: signal.Signals) -> Iterator[None]:
    """The signal is an exception meanwhile, so that what was begun is cleared away."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(number)

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def forward_signals(processes: Sequence[Popen[bytes]]) -> Iterator[list[signal.Signals]]:
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
