"""A lock on a folder, for one writer at a time. It ends with the process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

LOCK = ".lock"
log = logging.getLogger(__name__)
_held: set[int] = set()


class FolderInUseError(OSError):
    """Another process holds the folder."""


class FolderLock:
    """Holds a folder until close(), by flock() on a file in it.

    The kernel releases the lock when the process ends, even by SIGKILL; forked children do not keep it. Over NFS,
    Linux turns it into a lock of the server, which survives a host that is lost until its lease expires (90 s). A
    file system without locks is a warning.

    Args:
        folder: An existing folder.

    Raises:
        FolderInUseError: Another process holds it; the sentence names its host and process.
        OSError: The lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._handle, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(self._handle)
            raise FolderInUseError(f"{folder} is in use by {holder}") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(self._handle)
                raise
            log.warning("%s: cannot be locked (%s): make sure that no other job writes it", folder, error.strerror)
        _held.add(self._handle)
        self._say(f"process {os.getpid()} on {socket.gethostname()}\n")

    def close(self) -> None:
        """Release the folder. Further calls do nothing."""
        if self._handle in _held:
            self._say("")
            _held.remove(self._handle)
            os.close(self._handle)

    def _say(self, who: str) -> None:
        with suppress(OSError):  # a full disk: the lock holds, it only does not say whose it is
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, who.encode(), 0)


def _forget() -> None:
    """In a forked child: close its copies, which would hold the locks when the parent is gone."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)
