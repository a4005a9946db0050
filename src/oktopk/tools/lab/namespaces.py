"""Create and remove network namespaces, and end the processes inside."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from ...errors import OkTopkError

_SPACES = Path("/var/run/netns")
_NAME = re.compile(r"oktopk-(?P<pid>\d+)-(?P<start>\d+)-\d+-(?:bridge|host\d+)")
_COMMAND_TIMEOUT = 30.0
KILL_TIMEOUT = 10.0


class LabError(OkTopkError):
    """The lab cannot be built or used."""


def find_tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def call(name: str, *arguments: str) -> str:
    """Run `ip` or `tc` and return its output."""
    run = subprocess.run(
        [find_tool(name) or name, *arguments],
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT,
        check=False,
    )
    if run.returncode:
        raise LabError(f"`{name} {' '.join(arguments)}` failed: {run.stderr.strip()}")
    return run.stdout


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks, which distinguishes two processes with the same pid; None after its
    end.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _processes_in(names: Collection[str]) -> list[int]:
    """List the processes in these namespaces."""
    wanted = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            wanted.add(os.stat(_SPACES / name)[1:3])  # inode and device
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # The process has ended, or does not allow access; those of a lab do.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}/ns/net")[1:3] in wanted:
                pids.append(int(pid))
    return pids


def end_processes(names: Collection[str], patience: float) -> None:
    """End every process in these namespaces, grandchildren included: SIGTERM first, then SIGKILL."""
    start, number = time.monotonic(), signal.SIGTERM
    signalled: set[int] = set()
    while pids := _processes_in(names):
        waited = time.monotonic() - start
        if waited > patience + KILL_TIMEOUT:
            raise LabError(f"processes {pids} of the lab survived SIGKILL")
        if waited >= patience:
            number, signalled = signal.SIGKILL, set()
        for pid in set(pids) - signalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            signalled.add(pid)
        time.sleep(0.005)


def remove(names: Collection[str]) -> None:
    """Remove namespaces with system calls only: an exiting process cannot start `ip`."""
    end_processes(names, patience=0.0)
    libc = ctypes.CDLL(None, use_errno=True)
    for path in map(_SPACES.joinpath, names):
        lazily = 2
        if libc.umount2(os.fsencode(path), lazily) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
            raise LabError(f"cannot unmount {path}: {os.strerror(ctypes.get_errno())}")
        path.unlink(missing_ok=True)


def list_namespaces(prefix: str = "") -> list[tuple[str, re.Match[str]]]:
    """List the namespaces of labs, sorted by name."""
    names = sorted(os.listdir(_SPACES)) if _SPACES.is_dir() else []
    return [(name, match) for name in names if name.startswith(prefix) and (match := _NAME.fullmatch(name))]


def remove_orphans() -> None:
    """Remove the labs of processes that have ended."""
    remove([name for name, match in list_namespaces() if start_time(int(match["pid"])) != int(match["start"])])
