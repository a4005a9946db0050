"""Count the messages of rank 0 by phase, operation and stage, and by size in powers of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .runs import Run, Step, Transfer


@dataclass
class MessageKind:
    """All messages of one kind over the steps of a phase. `sizes[b]` of them have [2^b, 2^(b+1)) bytes.

    The library's all-reduce does not report its messages: it is `modelled` as a ring with messages of equal size.
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

    def add(self, moved: Transfer) -> None:
        self.bytes += moved.bytes
        self.messages += moved.messages
        self.seconds += moved.seconds
        for power, count in moved.sizes.items():
            self.sizes[power] = self.sizes.get(power, 0) + count


def count_messages(run: Run) -> list[dict[str, Any]]:
    return [asdict(kind) for kind in _kinds(run.steps)]


def _kinds(steps: Iterable[Step]) -> list[MessageKind]:
    kinds: dict[tuple[object, ...], MessageKind] = {}
    for step in steps:
        for moved in step.traffic or ():
            key = (step.phase, moved.operation, moved.stage, moved.control, moved.modelled)
            kinds.setdefault(key, MessageKind(*key)).add(moved)
    return sorted(kinds.values(), key=lambda kind: (kind.phase, -kind.bytes, kind.operation, kind.stage))
