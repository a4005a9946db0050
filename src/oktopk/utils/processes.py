"""Processes of this machine that work together: started one by one, told of signals, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import torch.distributed as dist

from .signals import ask_to_end, forward_signals

Stream = int | IO[bytes] | None


@dataclass(frozen=True)
class Process:
    """One that is to be started. `environment` is added to that of this process; streams are as in Popen."""

    environment: Mapping[str, str] = field(default_factory=dict)
    stdout: Stream = None
    stderr: Stream = None


@contextmanager
def local_world(count: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each of `count` ranks that find each other on loopback, while the block lasts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks find the store above, and none opens another one
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@contextmanager
def started(
    command: Sequence[str], wanted: Sequence[Process]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[signal.Signals]]]:
    """The processes, and the signals that came meanwhile and were passed on to them. Who still runs at the end of
    the block is killed.

    A signal is noted, and raises nothing: a process that is being started must not be forgotten.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with forward_signals(processes) as came:
        try:
            for one in wanted:
                environment = {**os.environ, **one.environment}
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=one.stdout,
                    stderr=one.stderr,
                    start_new_session=True,
                )
                processes.append(process)
                if came:  # before it could be told with the others
                    ask_to_end(process, came[-1])
            yield processes, came
        finally:
            for process in processes:
                with process:  # closes its pipes, and waits for it
                    process.kill()
