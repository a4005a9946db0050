"""Runs of the same setting, which differ in their seed only, and the look of each setting: a hue per algorithm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from ..units import percent
from . import colours

Runs = Sequence[Mapping[str, Any]]
_ORIGIN = re.compile(r"\s+# .*")
_SEED = re.compile(r"^seed = (\d{1,18})\b", re.MULTILINE)
_OF_A_RUN = ("seed", "out", "resume")
"""Options in which runs of the same setting may differ."""


@dataclass(frozen=True)
class Group:
    """Runs of one setting; a run that no other one repeats is a group of its own, under its own name."""

    name: str
    algorithm: str
    runs: Runs
    colour: str
    dash: str

    def finals(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows of these runs."""
        own = {run["name"] for run in self.runs}
        return [row for row in rows if row["run"] in own]


def group_runs(runs: Runs) -> list[Group]:
    """Group the runs by setting, in the order in which settings first appear."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(_setting(run), []).append(run)
    parts: list[Runs] = []
    for members in found.values():
        seeds = set(map(_seed, members))
        repeats = None not in seeds and len(seeds) == len(members)
        parts += [members] if repeats else [[run] for run in members]
    algorithms = [str(part[0]["about"]["algorithm"]) for part in parts]
    styles, names = colours.family_styles(algorithms), _names(parts)
    return [Group(*one) for one in zip(names, algorithms, parts, *zip(*styles, strict=True), strict=True)]


def _setting(run: Mapping[str, Any]) -> tuple[Any, ...]:
    about = run["about"]
    lines = [_ORIGIN.sub("", line) for line in run["config"].splitlines() if not line.startswith("#")]
    options = tuple(line for line in lines if line.partition(" = ")[0] not in _OF_A_RUN)
    return (*(about[name] for name in ("dnn", "dataset", "algorithm", "density", "world")), options)


def _seed(run: Mapping[str, Any]) -> float | None:
    """The seed, by the result of the run, or by its configuration while there is no result."""
    known, written = run["about"]["seed"], _SEED.search(run["config"])
    return known if isinstance(known, float) else float(written[1]) if written else None


def _names(parts: Sequence[Runs]) -> list[str]:
    names = [part[0]["name"] if len(part) == 1 else _name(part) for part in parts]
    return [
        f"{name} ({part[0]['name']}, …)" if names.count(name) > 1 and len(part) > 1 else name
        for name, part in zip(names, parts, strict=True)
    ]


def _name(part: Runs) -> str:
    """
    >>> _name([{"about": {"algorithm": "oktopk", "density": 0.01}}])
    'oktopk, 1 %'
    """
    about = part[0]["about"]
    density = about["density"]
    if about["algorithm"] == "dense" or density is None:
        return str(about["algorithm"])
    shown = percent(density) if isinstance(density, float) else "schedule" if ":" in density else density
    return f"{about['algorithm']}, {shown}"


def spread(values: Sequence[float | None]) -> tuple[float, float | None] | None:
    """Mean and standard deviation of the values that are known; one value has no deviation.

    >>> spread([1.0, None, 3.0]), spread([2.0]), spread([None])
    ((2.0, 1.4142135623730951), (2.0, None), None)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return fmean(known), stdev(known) if len(known) > 1 else None
