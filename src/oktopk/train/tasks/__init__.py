"""The workloads. To add one, add a file here with a tuple WORKLOADS; nothing else changes."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .base import DataSource, Shard, StepPosition, Tally, Task, Workload


def _find_workloads() -> dict[str, Workload]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return {workload.dnn: workload for module in modules for workload in getattr(module, "WORKLOADS", ())}


WORKLOADS = _find_workloads()
"""All workloads, by their --dnn name."""

__all__ = ["WORKLOADS", "DataSource", "Shard", "StepPosition", "Tally", "Task", "Workload"]
