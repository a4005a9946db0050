"""Start processes on this machine that work together, forward signals to them, and leave none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import torch.distributed as dist

from .secret import SECRET, new_secret
from .signals import ask_to_end, forward_signals

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
Stream = int | IO[bytes] | None


@dataclass(frozen=True)
class Process:
    """A process to start.

    Attributes:
        environment: Variables to add to the environment of this process.
        stdout: As in subprocess.Popen.
        stderr: As in subprocess.Popen.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    stdout: Stream = None
    stderr: Stream = None


@contextmanager
def local_world(count: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment of each of `count` ranks, which listen on loopback only and share a random secret.

    Their rendezvous lasts for the block.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # by itself the store would listen on all interfaces
    port = listener.getsockname()[1]
    _store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        SECRET: new_secret(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks use the store above instead of opening one
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@contextmanager
def start_processes(
    command: Sequence[str], wanted: Sequence[Process]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[signal.Signals]]]:
    """Start the processes, forward signals to them, and kill those that still run at the end of the block.

    Yields the processes and the list of signals received so far. Signals do not raise here, because an exception
    in the middle of a start would lose a process.

    Args:
        command: The command of every process.
        wanted: One entry for each process.
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
                if came:  # this process was not there yet to be forwarded the signal
                    ask_to_end(process, came[-1])
            yield processes, came
        finally:
            for process in processes:
                with process:  # closes its pipes and waits for it
                    process.kill()
