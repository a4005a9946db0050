"""The workloads. To add one, add a file here with a tuple WORKLOADS; nothing else changes.

Plug-ins add theirs by an entry point of the group `oktopk.workloads`, or by assignment (docs/plugins.md).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from oktopk.utils.registry import Registry

from .base import DataSource, Shard, StepPosition, Tally, Task, Workload


def _accept(name: str, thing: Any) -> Workload:
    if not isinstance(thing, Workload):
        raise TypeError(f"expected an oktopk.train.tasks.Workload, got {thing!r}")
    if thing.dnn != name:
        raise ValueError(f"dnn must be {name!r}, which is how --dnn asks for it, got {thing.dnn!r}")
    return thing


def _find_workloads() -> dict[str, Workload]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return {workload.dnn: workload for module in modules for workload in getattr(module, "WORKLOADS", ())}


WORKLOADS: Registry[Workload] = Registry("network", "oktopk.workloads", _accept, _find_workloads())
"""All workloads, by their --dnn name."""

__all__ = ["WORKLOADS", "DataSource", "Shard", "StepPosition", "Tally", "Task", "Workload"]
