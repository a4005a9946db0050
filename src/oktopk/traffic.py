"""What was moved, by the kind of operation it belonged to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operation:
    """What a message belongs to: for the meter, and for errors that say where they happened."""

    name: str
    phase: str
    control: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.phase})"


@dataclass(frozen=True)
class Traffic:
    """What one kind of operation moved. Sizes are counted by powers of two: sizes[b] messages of [2^b, 2^(b+1)).

    `modelled` marks a library collective, whose inside cannot be seen: its bytes and messages are those of the
    ring algorithm, not counts.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    seconds: float = 0.0
    modelled: bool = False
    sizes: dict[int, int] = field(default_factory=dict)

    def __add__(self, other: Traffic) -> Traffic:
        sizes = dict(self.sizes)
        for bin_, count in other.sizes.items():
            sizes[bin_] = sizes.get(bin_, 0) + count
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.sent_messages + other.sent_messages,
            self.received_messages + other.received_messages,
            self.seconds + other.seconds,
            self.modelled or other.modelled,
            sizes,
        )


def total(traffic: Mapping[Operation, Traffic], chosen: Callable[[Operation], bool] = lambda _: True) -> Traffic:
    """The sum over the chosen operations."""
    return sum((t for operation, t in traffic.items() if chosen(operation)), Traffic())


def merge(parts: Iterable[Mapping[Operation, Traffic]]) -> dict[Operation, Traffic]:
    """Operation by operation."""
    merged: dict[Operation, Traffic] = {}
    for part in parts:
        for operation, moved in part.items():
            merged[operation] = merged[operation] + moved if operation in merged else moved
    return merged
