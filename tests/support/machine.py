"""A look at the machine: children and namespaces of a process, who heeds a signal, and which port is free."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

_SPACES = Path("/var/run/netns")


def children(pid: int) -> list[int]:
    """And theirs, which run."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def spaces_of(owner: int) -> list[str]:
    names = os.listdir(_SPACES) if _SPACES.exists() else []
    return [name for name in names if name.startswith(f"oktopk-{owner}-")]


@contextlib.contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """A process that is started meanwhile does not ignore the signal, even if this one does, in the background."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def free_port() -> int:
    """One that stays free until it is used: the kernel gives those from 32768 on to whoever asks for any."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(one.getsockname()[1])
