"""A forked process, such as a worker of a DataLoader, must not keep gloo's connections of its parent open.

If it did, ranks that wait in one of torch's own exchanges (DDP has some between steps) would not notice that the
parent has died. torch does not tell which sockets are gloo's, but the system does:

    thread gloo_tcp_loop  ──► waits at an epoll instance  ──► on which its sockets are registered

In the child a socket without a connection takes the place of each of them, and of the instance. So no number is
free for another file that gloo's destructors would close, and a child that uses the parent's group gets an error.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from pathlib import Path

from ...utils.timeouts import TIMEOUTS
from .scheduling import loop_threads

_SELF = Path("/proc/self")
_EPOLL = "anon_inode:[eventpoll]"
_REGISTERED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_TURN = 0.001
"""Seconds until a thread that has something to do is asked again where it waits."""
_watching = False
_instances: frozenset[int] = frozenset()
"""Descriptors of gloo's epoll instances, as they were when this process last forked."""


def leave_gloo_to_parent() -> None:
    """From now on, every process that is forked from this one gives up the connections of all gloo groups."""
    global _watching
    if not _watching and hasattr(os, "register_at_fork") and _SELF.is_dir():
        _watching = True
        os.register_at_fork(before=_find, after_in_child=_disconnect)


def _find() -> None:
    """Look where gloo's threads wait. One that is busy is asked again, for a while."""
    global _instances
    end, asking, found = time.monotonic() + TIMEOUTS.busy_loop, loop_threads(), set()
    while asking:
        for thread in sorted(asking):
            try:
                place = _first_argument(thread)
            except OSError:  # it has ended, or the system does not tell
                asking.discard(thread)
                continue
            if place is not None and _is_instance(place):
                found.add(place)
                asking.discard(thread)
        if not asking or time.monotonic() >= end:
            break
        time.sleep(_TURN)
    _instances = frozenset(found)


def _first_argument(thread: int) -> int | None:
    """Of the system call in which a thread waits; None while it runs."""
    call = (_SELF / "task" / str(thread) / "syscall").read_text().split()
    return int(call[1], 16) if len(call) > 1 else None


def _is_instance(number: int) -> bool:
    try:
        return os.readlink(_SELF / "fd" / str(number)) == _EPOLL
    except OSError:  # no descriptor
        return False


def _disconnect() -> None:
    """In the child: replace what is still registered as in the parent, and is a socket; then the instances.

    An instance is shared with the parent: what the child changed there, the parent's thread would act upon.
    """
    for instance in filter(_is_instance, _instances):  # another thread may have closed one meanwhile
        for number, inode in _registered(instance):
            if _is_socket(number, inode):
                _replace(number)
        _replace(instance)


def _is_socket(number: int, inode: int) -> bool:
    try:
        found = os.fstat(number)
    except OSError:  # the parent has opened it since
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_ino == inode


def _replace(number: int) -> None:
    with socket.socket() as unconnected:
        os.dup2(unconnected.fileno(), number, inheritable=False)


def _registered(instance: int) -> list[tuple[int, int]]:
    """Descriptor and inode of each file that an epoll instance watches: as the parent has them by now."""
    text = (_SELF / "fdinfo" / str(instance)).read_text()
    return [(int(number), int(inode, 16)) for number, inode in _REGISTERED.findall(text)]
