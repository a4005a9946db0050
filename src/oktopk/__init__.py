"""oktopk: the sparse gradient allreduce for PyTorch."""

from __future__ import annotations

from .algorithms import ALGORITHMS, Algorithm
from .allreducer import AllReducer
from .broadcast import broadcast_tensors
from .checkpoint import redistribute
from .collective import Info, sparse_allreduce
from .comm import (
    Communicator,
    GroupCommunicator,
    Metered,
    MPICommunicator,
    Traffic,
    run_threads,
)
from .ddp import OkTopkState, oktopk_hook
from .errors import Aborted, CommError, CommTimeout, NonFiniteError, OkTopkError, WireError
from .metrics import MetricsSink, ReductionEvent, StepEvent
from .optimizer import DistributedOptimizer
from .settings import Settings
from .sparse import SparseVector

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Aborted",
    "Algorithm",
    "AllReducer",
    "CommError",
    "CommTimeout",
    "Communicator",
    "DistributedOptimizer",
    "GroupCommunicator",
    "Info",
    "MPICommunicator",
    "Metered",
    "MetricsSink",
    "NonFiniteError",
    "OkTopkError",
    "OkTopkState",
    "ReductionEvent",
    "Settings",
    "SparseVector",
    "StepEvent",
    "Traffic",
    "WireError",
    "broadcast_tensors",
    "oktopk_hook",
    "redistribute",
    "run_threads",
    "sparse_allreduce",
]
