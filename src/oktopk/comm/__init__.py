"""Communicators over process groups, MPI and threads; and the meter around any of them."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import CommError
from ..metrics.traffic import Operation, Traffic, total
from .agreement import Digest, agree, checking_together, gather_json, post_digest
from .base import Communicator, Wrapped
from .group import GroupCommunicator
from .messages import pack, packed_bytes, unpack
from .metered import Metered
from .mpi import MPICommunicator
from .subset import Subset
from .threads import ThreadCommunicator, alone, run_threads
from .transport import Pending, PendingSum


def default_communicator(timeout: float | None = None) -> Communicator:
    """The default process group if torch.distributed is initialised, otherwise this process alone.

    A process that was started as one of several is not alone: then it is an error.
    """
    return GroupCommunicator(timeout=timeout) if _distributed() else alone()


def exclusive_communicator(timeout: float | None = None) -> Communicator:
    """The same ranks over separate connections, for a thread that communicates beside others."""
    return GroupCommunicator.exclusive(timeout=timeout) if _distributed() else alone()


def _distributed() -> bool:
    """Whether torch.distributed is initialised. Raises in one of several processes that have not done it."""
    if dist.is_available() and dist.is_initialized():
        return True
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") != "1":
            raise CommError(
                f"{name} is {os.environ[name]}, but torch.distributed is not initialised: call "
                "init_process_group first, or pass comm=oktopk.MPICommunicator() under mpiexec"
            )
    return False


__all__ = [
    "Communicator",
    "Digest",
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
    "alone",
    "checking_together",
    "default_communicator",
    "exclusive_communicator",
    "gather_json",
    "pack",
    "packed_bytes",
    "post_digest",
    "run_threads",
    "total",
    "unpack",
]
