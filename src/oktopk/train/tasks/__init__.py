"""What can be trained. A new workload is a new file here with a tuple WORKLOADS; nothing else changes."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .base import Clock, Share, Source, Tally, Task, Workload


def _found() -> dict[str, Workload]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return {workload.dnn: workload for module in modules for workload in getattr(module, "WORKLOADS", ())}


WORKLOADS = _found()
"""By the name that --dnn takes."""

__all__ = ["WORKLOADS", "Clock", "Share", "Source", "Tally", "Task", "Workload"]
