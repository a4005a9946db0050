"""Sinks for events: memory, JSON lines, CSV, TensorBoard, the trainer's lists, a trace for Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...utils.registry import Registry
from ..events import MetricsSink
from .base import Sink, as_sink
from .csvfile import CSVSink
from .flat import flat_reduction, flat_step
from .jsonl import JSONLSink
from .memory import MemorySink
from .tensorboard import TensorBoardSink
from .trace import TraceSink, merge_traces
from .trainer import TrainerLists

OpenSink = Callable[[Path], MetricsSink]
"""Opens a sink that writes to a folder."""


def _accept(name: str, thing: Any) -> OpenSink:
    if not callable(thing):
        raise TypeError(f"expected a class or a function that makes a sink for a folder, got {thing!r}")
    opened: OpenSink = thing
    return opened


SINKS: Registry[OpenSink] = Registry(
    "sink",
    "oktopk.sinks",
    _accept,
    {
        "csv": lambda folder: CSVSink(folder / "metrics.csv"),
        "trace": lambda folder: TraceSink(folder / "trace.json"),
    },
)
"""Sinks that `oktopk train --sinks` opens besides its own, by name: called with the folder of the run."""

__all__ = [
    "SINKS",
    "CSVSink",
    "JSONLSink",
    "MemorySink",
    "OpenSink",
    "Sink",
    "TensorBoardSink",
    "TraceSink",
    "TrainerLists",
    "as_sink",
    "flat_reduction",
    "flat_step",
    "merge_traces",
]
