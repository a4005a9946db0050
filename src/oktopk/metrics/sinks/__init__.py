"""Sinks for events: memory, JSON lines, CSV, TensorBoard, the trainer's lists, a trace for Perfetto."""

from .base import Sink, as_sink
from .csvfile import CSVSink
from .flat import flat_reduction, flat_step
from .jsonl import JSONLSink
from .memory import MemorySink
from .tensorboard import TensorBoardSink
from .trace import TraceSink, merge_traces
from .trainer import TrainerLists

__all__ = [
    "CSVSink",
    "JSONLSink",
    "MemorySink",
    "Sink",
    "TensorBoardSink",
    "TraceSink",
    "TrainerLists",
    "as_sink",
    "flat_reduction",
    "flat_step",
    "merge_traces",
]
