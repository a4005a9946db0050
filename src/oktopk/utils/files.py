"""Atomic writes, and safe reads of files from elsewhere."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; its file replaces `path` at the end of the block.

    If the block raises, `path` stays as it was. Several processes may write the same path at once: each writes its
    own file, and the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(path: Path) -> None:
    """Remove the temporary files that killed writers left next to `path`. No process may be writing it."""
    draft = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{16}")
    for name in os.listdir(path.parent):
        if draft.fullmatch(name):
            path.with_name(name).unlink()


def write_atomically(path: Path, content: bytes) -> None:
    """Write the content to disk, then replace the file in one step."""
    with atomic_path(path) as draft, open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk: files created, removed or renamed in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError for anything else: opening a pipe blocks, and a device may never end.
    """
    handle = os.open(os.fspath(path), os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file. Raises OSError if it has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, so that they survive a power failure."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)
