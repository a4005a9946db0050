"""Communicators over process groups, MPI and threads; and the meter around any of them."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import CommError
from ..metrics.traffic import Operation, Traffic, total
from ..utils.timeouts import TIMEOUTS
from .agreement import agree, agree_on_digest, gather_json
from .base import Communicator, Wrapped
from .group import GroupCommunicator
from .messages import pack, packed_bytes, unpack
from .metered import Metered
from .mpi import MPICommunicator
from .subset import Subset
from .threads import ThreadCommunicator, alone, run_threads
from .transport import Pending, PendingSum


def default_communicator(timeout: float = TIMEOUTS.operation) -> Communicator:
    """The default process group if torch.distributed is initialised, otherwise this process alone.

    A process that was started as one of several is not alone: then it is an error.
    """
    if dist.is_available() and dist.is_initialized():
        return GroupCommunicator(timeout=timeout)
    return _alone()


def exclusive_communicator(timeout: float = TIMEOUTS.operation) -> Communicator:
    """The same ranks over separate connections, for a thread that communicates beside others."""
    if dist.is_available() and dist.is_initialized():
        return GroupCommunicator.exclusive(timeout=timeout)
    return _alone()


def _alone() -> Communicator:
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") != "1":
            raise CommError(
                f"{name} is {os.environ[name]}, but torch.distributed is not initialised: call "
                "init_process_group first, or pass comm=oktopk.MPICommunicator() under mpiexec"
            )
    return alone()


__all__ = [
    "Communicator",
    "GroupCommunicator",
    "MPICommunicator",
    "Metered",
    "Operation",
    "Pending",
    "PendingSum",
    "Subset",
    "ThreadCommunicator",
    "Traffic",
    "Wrapped",
    "agree",
    "agree_on_digest",
    "alone",
    "default_communicator",
    "exclusive_communicator",
    "gather_json",
    "pack",
    "packed_bytes",
    "run_threads",
    "total",
    "unpack",
]
