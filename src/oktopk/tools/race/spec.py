"""What a race asks, and what one of its cells does: written to the folder of the cell, and read by its job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from oktopk.errors import OkTopkError

from .links import link_name

FULL, QUALITY, TIMING = "full", "quality", "timing"
"""Kinds of cells: trained over the link; trained on loopback, for quality by step; timed over the link only."""
_FLAGS = {"val_every": "val_every_steps"}
"""Options of `oktopk race` with another name than their field of Race."""
_TARGET = re.compile(r"\s*(?P<metric>\S(?:.*?\S)?)\s*(?P<way><=|>=|≤|≥)\s*(?P<value>[-+.\deE]+)\s*")


class RaceError(OkTopkError, ValueError):
    """A race that is not possible."""


@dataclass(frozen=True)
class Target:
    """The quality that ends a cell: a validation metric at most (or at least) a value."""

    metric: str
    value: float
    at_most: bool = True

    def reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether a validation has reached the target."""
        found = metrics.get(self.metric)
        if found is None:
            return False
        return found <= self.value if self.at_most else found >= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.at_most else '>='} {self.value:g}"


def parse_target(text: str) -> Target:
    """Parse a target.

    >>> parse_target("val loss<=1.90")
    Target(metric='val loss', value=1.9, at_most=True)
    >>> print(parse_target("val acc ≥ 0.84"))
    val acc >= 0.84
    """
    match = _TARGET.fullmatch(text)
    try:
        value = float(match["value"]) if match else None
    except ValueError:
        value = None
    if match is None or value is None:
        raise RaceError(f"--target must be a metric, <= or >=, and a number, like 'val loss<=1.90'; got {text!r}")
    return Target(match["metric"], value, match["way"] in ("<=", "≤"))


@dataclass(frozen=True)
class Race:
    """What is the same for all cells of a race."""

    config: Mapping[str, Any]
    """The trainer's options by name, as primitives; seed and compression are the cell's."""
    ranks: int = 2
    steps: int | None = None
    """Limit in optimizer steps, and the length of the learning rate schedule; None: the configuration's."""
    seconds: float | None = None
    """Clock after which every cell ends, instead of a target."""
    target: Target | None = None
    val_every: int = 50
    """Steps between validations."""
    timing_steps: int = 60
    """Steady steps of a timing cell."""
    save_seconds: float = 300.0
    """Clock between checkpoints."""
    ranks_per_host: int = 1


@dataclass(frozen=True)
class Cell:
    """One training run of the race."""

    contender: str
    link: str
    seed: int
    kind: str = FULL

    @property
    def name(self) -> str:
        """The name of its folder.

        >>> Cell("oktopk:density=0.05:dense=*.bias", "100mbit", 0).name
        'oktopk_density=0.05_dense=%2A.bias-100mbit-seed0'
        """
        plain = re.sub(r"[^\w.=+-]", lambda found: f"%{ord(found[0]):02X}", self.contender.replace(":", "_"))
        where = {FULL: self.link, QUALITY: QUALITY, TIMING: f"{TIMING}-{self.link}"}[self.kind]
        return f"{plain}-{where}-seed{self.seed}"

    def __str__(self) -> str:
        where = link_name(self.link)
        what = {FULL: where, QUALITY: "quality by step", TIMING: f"step times, {where}"}[self.kind]
        return f"{self.contender}, {what}, seed {self.seed}"


@dataclass(frozen=True)
class Spec:
    """All that the job of a cell needs to know."""

    race: Race
    cell: Cell

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Read a spec; raises ValueError, TypeError or LookupError for anything else."""
        known = json.loads(text)
        race, target = dict(known["race"]), known["race"]["target"]
        return cls(Race(**{**race, "target": target and Target(**target)}), Cell(**known["cell"]))


def race_difference(here: Race, there: Race) -> str | None:
    """Say in what two races differ, or None."""
    for item in fields(Race):
        mine, theirs = getattr(here, item.name), getattr(there, item.name)
        if item.name == "config":
            different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            if different:
                key = different[0]
                return _describe(key, theirs.get(key), mine.get(key))
        elif mine != theirs:
            return _describe(_FLAGS.get(item.name, item.name), theirs, mine)
    return None


def _describe(name: str, there: object, here: object) -> str:
    shown = ["not set" if value is None else str(value) for value in (there, here)]
    return f"--{name.replace('_', '-')} is {shown[0]} there and {shown[1]} here"
