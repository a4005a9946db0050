"""Forked children of a rank, which have inherited its connections, and live on when it is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch.utils.data


@contextlib.contextmanager
def _fork() -> Iterator[list[int]]:
    """A child that does nothing."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield [pid]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def _loader() -> Iterator[list[int]]:
    """A worker of torch's DataLoader, which waits to be asked for the next sample."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # else it may have none
    samples = iter(torch.utils.data.DataLoader(range(1000), num_workers=1, multiprocessing_context="fork"))
    next(samples)
    try:
        yield [worker.pid for worker in samples._workers]  # type: ignore[attr-defined]
    finally:
        samples._shutdown_workers()  # type: ignore[attr-defined]


_MAKE: dict[str, Callable[[], AbstractContextManager[list[int]]]] = {
    "die with a child": _fork,
    "die with a loader": _loader,
}


@contextlib.contextmanager
def beside(kind: str, note: Path) -> Iterator[None]:
    """The children that the fault is about, for the time of the block; their numbers are in the note."""
    if kind not in _MAKE:
        yield
        return
    with _MAKE[kind]() as pids:
        note.write_text(" ".join(map(str, pids)))
        yield


def end_orphans(notes: Iterable[Path], running: Container[int]) -> None:
    """End the children of ranks that were killed, as far as they still run."""
    for pid in (int(pid) for note in notes for pid in note.read_text().split()):
        if pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
