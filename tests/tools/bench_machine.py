"""A look at the machine: who is a child of whom, and which namespaces belong to a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_SPACES = Path("/var/run/netns")


def children(pid: int) -> list[int]:
    """And theirs, which run."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def spaces_of(owner: int) -> list[str]:
    names = os.listdir(_SPACES) if _SPACES.exists() else []
    return [name for name in names if name.startswith(f"oktopk-{owner}-")]
