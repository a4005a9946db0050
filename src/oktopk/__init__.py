"""oktopk: sparse gradient all-reduce with error feedback for PyTorch."""

from __future__ import annotations

from . import _command as _command  # first: what follows takes seconds
from .algorithms import ALGORITHMS, Algorithm
from .collective import Info, sparse_allreduce
from .comm import Communicator, GroupCommunicator, Metered, MPICommunicator, Traffic, run_threads
from .comm.broadcast import broadcast_tensors
from .engine.settings import Settings
from .errors import Aborted, CommError, CommTimeout, NonFiniteError, OkTopkError, WireError
from .frontends.allreducer import AllReducer
from .frontends.ddp import OkTopkState, oktopk_hook
from .frontends.local import LocalOptimizer
from .frontends.optimizer import DistributedOptimizer
from .frontends.wrapped import redistribute
from .metrics.events import MetricsSink, ReductionEvent, StepEvent
from .wire.sparse_vector import SparseVector

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
    "LocalOptimizer",
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
