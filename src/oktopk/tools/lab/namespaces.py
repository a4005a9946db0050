"""Network namespaces of labs, and the processes inside."""

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
_NAME = re.compile(r"oktopk-(?P<pid>\d+)-(?P<born>\d+)-\d+-(?:bridge|host\d+)")
_COMMAND_TIMEOUT = 30.0
KILL_TIMEOUT = 10.0


class LabError(OkTopkError):
    """The lab cannot be built or used."""


def tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def call(name: str, *arguments: str) -> str:
    """What `ip` or `tc` answers."""
    run = subprocess.run(
        [tool(name) or name, *arguments], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False
    )
    if run.returncode:
        raise LabError(f"`{name} {' '.join(arguments)}` failed: {run.stderr.strip()}")
    return run.stdout


def birth(pid: int) -> int | None:
    """When a process started, in clock ticks; None once it has ended. Tells two users of one number apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _inside(names: Collection[str]) -> list[int]:
    """The processes in these namespaces."""
    wanted = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            wanted.add(os.stat(_SPACES / name)[1:3])  # inode and device
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # It has ended, or belongs to somebody who keeps even root out; ours do not.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}/ns/net")[1:3] in wanted:
                pids.append(int(pid))
    return pids


def clear(names: Collection[str], patience: float) -> None:
    """End every process in these namespaces, children of children too: they are asked, then killed."""
    start, number = time.monotonic(), signal.SIGTERM
    asked: set[int] = set()
    while pids := _inside(names):
        waited = time.monotonic() - start
        if waited > patience + KILL_TIMEOUT:
            raise LabError(f"processes {pids} of the lab do not end, not even by SIGKILL")
        if waited >= patience:
            number, asked = signal.SIGKILL, set()
        for pid in set(pids) - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            asked.add(pid)
        time.sleep(0.005)


def remove(names: Collection[str]) -> None:
    """By system calls alone: a process cannot start another one while it exits."""
    clear(names, patience=0.0)
    libc = ctypes.CDLL(None, use_errno=True)
    for path in map(_SPACES.joinpath, names):
        lazily = 2
        if libc.umount2(os.fsencode(path), lazily) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
            raise LabError(f"cannot unmount {path}: {os.strerror(ctypes.get_errno())}")
        path.unlink(missing_ok=True)


def existing(prefix: str = "") -> list[tuple[str, re.Match[str]]]:
    """The namespaces of labs, by name."""
    names = sorted(os.listdir(_SPACES)) if _SPACES.is_dir() else []
    return [(name, match) for name in names if name.startswith(prefix) and (match := _NAME.fullmatch(name))]


def sweep() -> None:
    """Remove the labs whose owner is no more."""
    remove([name for name, match in existing() if birth(int(match["pid"])) != int(match["born"])])
