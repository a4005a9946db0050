"""What was moved, by the kind of operation it belonged to."""

from __future__ import annotations

from collections import Counter
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

    `modelled` marks a library collective, whose inside cannot be seen: its bytes and messages are those that the
    algorithm must have, a ring for the library's own sums, not counts.
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


class Tally:
    """Traffic while it is counted: messages are many, so that one more must cost next to nothing."""

    __slots__ = ("_more", "_received", "_sent", "seconds")

    def __init__(self) -> None:
        self._sent: list[int] = []
        self._received: list[int] = []
        self._more = Traffic()
        self.seconds = 0.0

    def sent(self, size: int) -> None:
        self._sent.append(size)

    def received(self, size: int) -> None:
        self._received.append(size)

    def add(self, moves: Traffic) -> None:
        self._more += moves

    def traffic(self) -> Traffic:
        sizes = Counter(max(size, 1).bit_length() - 1 for size in self._sent)
        counted = Traffic(
            sum(self._sent),
            sum(self._received),
            len(self._sent),
            len(self._received),
            self.seconds,
            sizes=dict(sizes),
        )
        return counted + self._more


def ring(size: int, world: int, seconds: float = 0.0) -> Traffic:
    """Of an all-reduce of so many bytes, as the ring algorithm does it."""
    return modelled(*ring_moves(size, world), seconds)


def ring_moves(size: int, world: int) -> tuple[int, int]:
    """Bytes and messages that a rank sends then."""
    return 2 * size * (world - 1) // world, 2 * (world - 1)


def modelled(moved: int, messages: int, seconds: float) -> Traffic:
    """Of a library's collective that has each rank send and receive so many bytes, in messages of one size."""
    sizes = {max(1, moved // messages).bit_length() - 1: messages} if messages else {}
    return Traffic(moved, moved, messages, messages, seconds, True, sizes)


def total(traffic: Mapping[Operation, Traffic], chosen: Callable[[Operation], bool] = lambda _: True) -> Traffic:
    """The sum over the chosen operations."""
    parts = [moved for operation, moved in traffic.items() if chosen(operation)]
    return parts[0] if len(parts) == 1 else sum(parts, Traffic())


def merge(parts: Iterable[Mapping[Operation, Traffic]]) -> dict[Operation, Traffic]:
    """Operation by operation."""
    merged: dict[Operation, Traffic] = {}
    for part in parts:
        for operation, moved in part.items():
            merged[operation] = merged[operation] + moved if operation in merged else moved
    return merged
