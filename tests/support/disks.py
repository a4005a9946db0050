"""A disk that fills up under files that are open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FULL = "/dev/full"


def fill_disk(folder: Path) -> None:
    """From now on the kernel says ENOSPC to every write to a file below the folder: it is /dev/full instead.

    Files that are opened for each write, as TensorBoard does, become links to it.
    """
    if not os.path.exists(FULL):
        pytest.skip(f"needs {FULL}")
    full = os.open(FULL, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        try:
            path = Path(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the handle of this listing
            continue
        if folder in path.parents and path.name != ".lock":
            os.dup2(full, int(entry), inheritable=False)
    os.close(full)
    for path in folder.rglob("events.out.*"):
        path.unlink()
        path.symlink_to(FULL)
