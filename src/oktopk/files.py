"""Files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
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


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file in one step, after its content has reached the disk."""
    with appearing(path) as draft, open(draft, "wb") as file:
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


def keep_copy(path: Path) -> Path:
    """Write the file's content to the first free of `name.bak`, `name.bak2`, … and say which."""
    content, number = path.read_bytes(), 1
    while (copy := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    write_atomically(copy, content)
    return copy
