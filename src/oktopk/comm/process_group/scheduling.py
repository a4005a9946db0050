"""Scheduling of gloo's threads, which otherwise preempt the threads that they wait for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)
_LOOP = "gloo_tcp_loop"
"""The thread of a gloo group that serves its connections."""
_THREADS = Path("/proc/self/task")


@contextmanager
def batch_scheduled() -> Iterator[None]:
    """Schedule the threads of gloo groups that are made in the block as batch work (SCHED_BATCH).

    While another thread holds the lock of a connection, gloo's thread polls in a loop. If it has preempted that
    thread when it woke up, both are stuck until its time slice is over. Batch work does not preempt; on an idle
    core it runs at once. Where the system has no such class, nothing happens.
    """
    before = loop_threads()
    yield
    for thread in loop_threads() - before:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # a sandbox may forbid it: sums are then only slower
            _log.debug("gloo's thread keeps its scheduling class: %s", error)


def loop_threads() -> set[int]:
    """The threads of this process with gloo's name; none where the system does not tell."""
    if not hasattr(os, "sched_setscheduler") or not _THREADS.is_dir():
        return set()
    found = set()
    for thread in _THREADS.iterdir():
        try:
            if (thread / "comm").read_text().strip() == _LOOP:
                found.add(int(thread.name))
        except OSError:  # the thread has ended
            continue
    return found
