"""Signals that end a program: raise them as exceptions, or forward them to child processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import Popen

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal other than Ctrl-C interrupted the program, or a signal ended its child processes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupted_code(error: KeyboardInterrupt) -> int:
    """The exit code of a program that a signal ended.

    >>> interrupted_code(KeyboardInterrupt()), interrupted_code(Interrupted(signal.SIGTERM))
    (130, 143)
    """
    return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


@contextmanager
def raise_on_signal(number: signal.Signals) -> Iterator[None]:
    """Raise Interrupted when the signal arrives within the block, so that the code inside can clean up."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(number)

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def forward_signals(processes: Sequence[Popen[bytes]]) -> Iterator[list[signal.Signals]]:
    """Forward Ctrl-C, SIGTERM and SIGHUP to the running processes. Yields the list of signals received so far.

    Start the processes in sessions of their own: otherwise the terminal sends them Ctrl-C too, and a second one
    keeps them from saving.
    """
    came: list[signal.Signals] = []

    def forward(number: int, _: object) -> None:
        came.append(signal.Signals(number))
        for process in processes:
            ask_to_end(process, came[-1])

    # Ignored signals stay ignored, for nohup.
    handled = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ask_to_end(process: Popen[bytes], number: signal.Signals) -> None:
    """Send the signal to a running process; SIGTERM in place of SIGHUP."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM if number is signal.SIGHUP else number)
