"""The schemas of what commands print with --json: each has a name and a version (docs/json.md).

A version changes when a key goes away or changes its meaning; new keys do not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMAS = {
    "train": 1,
    "sweep": 1,
    "report": 1,
    "bench": 1,
    "race": 1,
    "simulate": 1,
    "doctor": 1,
    "data.an4": 1,
    "data.cifar10": 1,
    "data.fix-manifest": 1,
    "data.check": 1,
}
"""The version of each."""


def add_schema(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its schema in front.

    >>> add_schema("train", {"steps": 5})
    {'schema': {'name': 'oktopk.train', 'version': 1}, 'steps': 5}
    """
    return {"schema": {"name": f"oktopk.{name}", "version": SCHEMAS[name]}, **document}
