"""Threads that wait until a core is free, instead of pushing others off theirs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)
_THREADS = Path("/proc/self/task")


@contextmanager
def unhurried(name: str) -> Iterator[None]:
    """Native threads of that name which are started within the block are scheduled as batch work.

    The thread that serves gloo's connections does not sleep while somebody else holds the lock of one: it asks
    again, and again. If its waking up has pushed that very holder off the core, both are stuck until the
    scheduler takes the core away from it, milliseconds later. Batch work pushes nobody off; on a core that
    is idle it runs at once, as always. Where the system knows no such thing, nothing happens.
    """
    before = _named(name)
    yield
    for thread in _named(name) - before:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # a sandbox may forbid it: then it is only slower
            _log.debug("the thread %s cannot be made batch work: %s", name, error)


def _named(name: str) -> set[int]:
    """The threads of this process that have this name; none where the system does not tell."""
    if not hasattr(os, "sched_setscheduler") or not _THREADS.is_dir():
        return set()
    found = set()
    for thread in _THREADS.iterdir():
        try:
            if (thread / "comm").read_text().strip() == name:
                found.add(int(thread.name))
        except OSError:  # it has ended meanwhile
            continue
    return found
