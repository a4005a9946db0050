"""The cores that this process may use."""

from __future__ import annotations

import os


def own_cores() -> list[int]:
    """Where the system does not tell which, all of the machine."""
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
