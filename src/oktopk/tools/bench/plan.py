"""The plan of a measurement, as sent to every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from oktopk.tools.hooks import BF16, FP16, POWERSGD
from oktopk.utils.names import hint
from oktopk.utils.registry import PluginError
from oktopk.wire.codecs import find_values

from .names import (
    MEMORY,
    REFERENCES,
    BenchError,
    check_name,
    link_limit_target,
    parse_contender,
)
from .workloads import MODELS

_COPIES = {POWERSGD: 4, FP16: 2, BF16: 2, "dense": 2, MEMORY: 2}
"""Copies of the gradient that a contender holds; sparse algorithms also have a residual and a work buffer."""
_SPARSE_COPIES, _SHARED_COPIES, _PROCESS_BYTES = 3, 8, 400e6
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True)
class Plan:
    """One measurement on one link. The contenders of a group are in memory together and timed in turn."""

    groups: tuple[tuple[str, ...], ...]
    ranks: int
    link: str | None = None
    """The rate of the lab's links, or "none" for no limit; None for processes on loopback."""
    model: str = "resnet50-shapes"
    params: int = MODELS["resnet50-shapes"][0]
    density: float = 0.01
    values: str = "fp32"
    bucket_mb: float | None = None
    steps: int = 15
    timeout: float = 1800.0
    """Time limit in seconds."""
    progress: bool = False
    ranks_per_host: int = 1
    """Ranks on each host, which share its link in a lab."""

    def __post_init__(self) -> None:
        for name in self.names:
            check_name(name)
        if self.model not in MODELS:
            raise BenchError(f"unknown model {self.model!r}: {hint(self.model, MODELS)}")
        try:
            find_values(self.values)
        except (ValueError, PluginError) as error:
            raise BenchError(f"--values: {error}") from error
        if not 0 < self.density <= 1:
            raise BenchError(f"--density must be in (0, 1], got {self.density:g}")
        if self.model == "resnet50-shapes" and self.params != MODELS[self.model][0]:
            raise BenchError(f"{self.model} has {MODELS[self.model][0]:,} parameters: use --model synthetic")
        for name in ("ranks", "params", "steps", "timeout", "bucket_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BenchError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")

        if self.ranks_per_host < 1 or self.ranks % self.ranks_per_host:
            raise BenchError(f"--ranks {self.ranks} cannot be divided by --ranks-per-host {self.ranks_per_host}")

    @property
    def names(self) -> tuple[str, ...]:
        """All contenders, without repeats."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group))

    @property
    def in_lab(self) -> bool:
        return self.link is not None

    def fit_to_memory(self, memory: float | None) -> Plan:
        """Split the contenders into as few groups as fit into this many bytes, each with the references."""
        return replace(self, groups=group_to_fit(self.names, self.params, self.ranks, memory))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        known = json.loads(text)
        return cls(**{**known, "groups": tuple(map(tuple, known["groups"]))})


def group_to_fit(
    names: Sequence[str], params: int, ranks: int, memory: float | None
) -> tuple[tuple[str, ...], ...]:
    """Contenders in groups that fit in memory, or all in one if that is not known.

    >>> group_to_fit(["ddp", "topka", "oktopk"], 100_000_000, 4, 30e9)
    (('ddp', 'topka'), ('ddp', 'oktopk'))
    """
    if memory is None:
        return (tuple(names),)
    copy = 4 * params * ranks
    shared = tuple(name for name in names if name in REFERENCES)
    shared_copies = _SHARED_COPIES + sum(map(_copies, shared))
    room = _SHARE_OF_MEMORY * memory - ranks * _PROCESS_BYTES - shared_copies * copy
    groups: list[list[str]] = [[]]
    left = room
    for name in (name for name in names if name not in shared):
        need = _copies(name) * copy
        if need > room:
            raise BenchError(
                f"{ranks} ranks with {params:,} parameters do not fit into the free memory "
                f"({memory / 1e9:.1f} GB): use fewer --ranks or --params"
            )
        if need > left:
            groups.append([])
            left = room
        groups[-1].append(name)
        left -= need
    return tuple((*shared, *group) for group in groups)


def _copies(name: str) -> int:
    if link_limit_target(name) is not None:
        return 0
    own = parse_contender(name)
    if own is not None and own.algorithm != "dense":
        return _SPARSE_COPIES
    return _COPIES.get(name if own is None else own.algorithm, 1)


def free_memory() -> float | None:
    """Free memory in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines)
    return 1024.0 * int(known["MemAvailable"].split()[0]) if "MemAvailable" in known else None
