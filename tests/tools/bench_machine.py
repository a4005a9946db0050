"""A look at the machine: who is a child of whom, which namespaces belong to a process, and who heeds a signal."""

from __future__ import annotations

import contextlib
import os
import signal
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
