"""Limits of a process group: how long its ranks wait, and how many files they may open."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any

import torch

from ...errors import CommError
from ...utils.timeouts import TIMEOUTS

_SPARE = 64
"""Descriptors for everything else that a process opens."""
_LONGEST = 1e9
"""Seconds, about 30 years: torch counts milliseconds in 64 bits."""


def group_timeout(group: Any) -> float:
    """The timeout of a process group, in seconds: what init_process_group was told, or torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        if options is not None:
            return float(options._timeout.total_seconds())
    return TIMEOUTS.operation


def timeout_problem(timeout: object) -> str | None:
    """What is wrong with a timeout that somebody gave; None if nothing is."""
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is None or (number and 0 < float(timeout) <= _LONGEST):  # type: ignore[arg-type]
        return None
    return f"timeout must be a number of seconds above 0 and up to {_LONGEST:g}, got {timeout!r}"


def raise_file_limit(connections: int) -> None:
    """Make room for so many connections: raise the soft limit on open files, as far as the hard one allows.

    Raises:
        CommError: The hard limit is too low.
    """
    try:
        import resource

        needed = len(os.listdir("/proc/self/fd")) + connections + _SPARE
    except (ImportError, OSError):  # not Linux; then the system says so itself
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (resource.RLIM_INFINITY, hard) or soft >= needed:
        enough = soft == resource.RLIM_INFINITY or soft >= needed
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        enough = hard == resource.RLIM_INFINITY or hard >= needed
    if not enough:
        raise CommError(
            f"this rank needs about {needed} open files for {connections} connections, but may open {hard}: raise "
            "the limit (ulimit -Hn, LimitNOFILE=), or use fewer ranks"
        )
