"""The cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> list[int]:
    """List the cores that this process may use; all cores where the system does not tell."""
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
