"""Files that are written whole or not at all, and files of others, read without waiting or end."""

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
    """A name beside `path` to write to; what is there at the end takes the place of `path`, on an error nothing.

    Several processes may do this to the same path at once: each writes its own file, and the last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(path: Path) -> None:
    """What writers that were killed have left beside `path`. Nobody may be writing it now."""
    draft = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{16}")
    for name in os.listdir(path.parent):
        if draft.fullmatch(name):
            path.with_name(name).unlink()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file in one step, after its content has reached the disk."""
    with atomic_path(path) as draft, open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make names that have come, gone or changed in a folder outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """To be read; an OSError if it is no regular file: a pipe is waited for, and a device may have no end."""
    handle = os.open(os.fspath(path), os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """All of a regular file; an OSError if it has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it that are missing; they outlast a power cut."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def keep_copy(path: Path) -> Path:
    """Write the file's content to the first free of `name.bak`, `name.bak2`, … and say which."""
    content, number = path.read_bytes(), 1
    while (copy := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    write_atomically(copy, content)
    return copy
