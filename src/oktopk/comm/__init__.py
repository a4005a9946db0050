"""Transports: process groups, MPI, threads; and the meter around any of them."""

from __future__ import annotations

import torch.distributed as dist

from .agreement import agree
from .base import DEFAULT_TIMEOUT, Communicator, Operation, Pending, pack, packed_bytes, unpack
from .group import GroupCommunicator
from .metered import Metered, Traffic, total
from .mpi import MPICommunicator
from .threads import ThreadCommunicator, alone, run_threads


def default_communicator(timeout: float = DEFAULT_TIMEOUT) -> Communicator:
    """The default process group if torch.distributed is initialised, otherwise this process alone."""
    if dist.is_available() and dist.is_initialized():
        return GroupCommunicator(timeout=timeout)
    return alone()


__all__ = [
    "DEFAULT_TIMEOUT",
    "Communicator",
    "GroupCommunicator",
    "MPICommunicator",
    "Metered",
    "Operation",
    "Pending",
    "ThreadCommunicator",
    "Traffic",
    "agree",
    "default_communicator",
    "pack",
    "packed_bytes",
    "run_threads",
    "total",
    "unpack",
]
