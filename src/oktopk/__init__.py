"""oktopk: the sparse gradient allreduce for PyTorch."""

from __future__ import annotations

from .algorithms import ALGORITHMS, Algorithm
from .collective import Info, sparse_allreduce
from .comm import (
    Communicator,
    GroupCommunicator,
    Metered,
    MPICommunicator,
    Traffic,
    run_threads,
)
from .errors import Aborted, CommError, CommTimeout, OkTopkError, WireError
from .sparse import SparseVector

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Aborted",
    "Algorithm",
    "CommError",
    "CommTimeout",
    "Communicator",
    "GroupCommunicator",
    "Info",
    "MPICommunicator",
    "Metered",
    "OkTopkError",
    "SparseVector",
    "Traffic",
    "WireError",
    "run_threads",
    "sparse_allreduce",
]
