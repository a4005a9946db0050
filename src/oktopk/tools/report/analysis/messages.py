"""Messages that rank 0 sent, by phase, operation and stage, with their sizes by powers of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .runs import Moved, Run, Step


@dataclass
class Kind:
    """All messages of a kind over the steps of a phase. `sizes[b]` of them had [2^b, 2^(b+1)) bytes.

    The inside of a library's all-reduce cannot be seen: it is `modelled` as a ring with messages of equal sizes.
    """

    phase: str
    operation: str
    stage: str
    control: bool
    modelled: bool
    bytes: float = 0.0
    messages: float = 0.0
    seconds: float = 0.0
    sizes: dict[int, float] = field(default_factory=dict)

    def add(self, moved: Moved) -> None:
        self.bytes += moved.bytes
        self.messages += moved.messages
        self.seconds += moved.seconds
        for power, count in moved.sizes.items():
            self.sizes[power] = self.sizes.get(power, 0) + count


def messages(run: Run) -> list[dict[str, Any]]:
    return [asdict(kind) for kind in _kinds(run.steps)]


def _kinds(steps: Iterable[Step]) -> list[Kind]:
    kinds: dict[tuple[object, ...], Kind] = {}
    for step in steps:
        for moved in step.traffic or ():
            key = (step.phase, moved.operation, moved.stage, moved.control, moved.modelled)
            kinds.setdefault(key, Kind(*key)).add(moved)
    return sorted(kinds.values(), key=lambda kind: (kind.phase, -kind.bytes, kind.operation, kind.stage))
