"""oktopk: sparse gradient all-reduce with error feedback for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from .metrics.sinks import SINKS
from .utils.registry import PluginError
from .wire.codecs import VALUE_CODES as VALUES
from .wire.codecs import ValueCodec
from .wire.sparse_vector import SparseVector

if TYPE_CHECKING:
    from .frontends.fsdp.state import FsdpState
    from .tools.frames import load_run, load_sweep

__version__ = "0.2.0"

__all__ = [
    "ALGORITHMS",
    "SINKS",
    "VALUES",
    "Aborted",
    "Algorithm",
    "AllReducer",
    "CommError",
    "CommTimeout",
    "Communicator",
    "DistributedOptimizer",
    "FsdpState",
    "GroupCommunicator",
    "Info",
    "LocalOptimizer",
    "MPICommunicator",
    "Metered",
    "MetricsSink",
    "NonFiniteError",
    "OkTopkError",
    "OkTopkState",
    "PluginError",
    "ReductionEvent",
    "Settings",
    "SparseVector",
    "StepEvent",
    "Traffic",
    "ValueCodec",
    "WireError",
    "broadcast_tensors",
    "load_run",
    "load_sweep",
    "oktopk_hook",
    "redistribute",
    "run_threads",
    "sparse_allreduce",
]


def __getattr__(name: str) -> Any:
    """Import what reads runs, and what imports FSDP, only when it is asked for: both take their time."""
    if name in ("load_run", "load_sweep"):
        from .tools import frames

        return getattr(frames, name)
    if name == "FsdpState":
        from .frontends.fsdp.state import FsdpState

        return FsdpState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
