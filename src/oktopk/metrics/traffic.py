"""Bytes and seconds: what operations moved, and a stopwatch for the stages of a reduction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch._C._profiler import _RecordFunctionFast  # record_function itself costs thirty times as much


@dataclass(frozen=True)
class Operation:
    """The operation that a message belongs to, for the meter and for error messages.

    Attributes:
        name: The collective: all_gather, all_to_all, all_reduce, …
        phase: The phase of the algorithm that it serves.
        control: The message carries no gradient.
    """

    name: str
    phase: str
    control: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.phase})"


@dataclass(frozen=True)
class Traffic:
    """What one operation moved on one rank.

    Attributes:
        sent_bytes: Bytes sent.
        received_bytes: Bytes received.
        sent_messages: Messages sent.
        received_messages: Messages received.
        seconds: Time spent in the operation.
        modelled: Bytes and messages were computed, not counted: a collective of the transport is assumed to be
            a ring.
        sizes: Histogram of the messages sent: sizes[b] counts those of [2^b, 2^(b+1)) bytes.

    Example:
        >>> import oktopk
        >>> both = oktopk.Traffic(sent_bytes=100, sent_messages=1) + oktopk.Traffic(sent_bytes=50, sent_messages=2)
        >>> both.sent_bytes, both.sent_messages
        (150, 3)
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
    """Counts traffic. There are many messages, so counting one must be cheap."""

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
        counts = sum(self._sent), sum(self._received), len(self._sent), len(self._received)
        return Traffic(*counts, self.seconds, sizes=dict(sizes)) + self._more


def ring(size: int, world: int, seconds: float = 0.0) -> Traffic:
    """The traffic of a ring all-reduce of `size` bytes: each rank sends and receives equal messages."""
    moved, messages = 2 * size * (world - 1) // world, 2 * (world - 1)
    sizes = {max(1, moved // messages).bit_length() - 1: messages} if messages else {}
    return Traffic(moved, moved, messages, messages, seconds, True, sizes)


def total(traffic: Mapping[Operation, Traffic], chosen: Callable[[Operation], bool] = lambda _: True) -> Traffic:
    """Sum the traffic of the chosen operations."""
    parts = [moved for operation, moved in traffic.items() if chosen(operation)]
    return parts[0] if len(parts) == 1 else sum(parts, Traffic())


def merge(parts: Iterable[Mapping[Operation, Traffic]]) -> dict[Operation, Traffic]:
    """Add up traffic by operation."""
    merged: dict[Operation, Traffic] = {}
    for part in parts:
        for operation, moved in part.items():
            merged[operation] = merged[operation] + moved if operation in merged else moved
    return merged


class Span(NamedTuple):
    """A stage of a reduction: its name, start and stop in seconds of time.perf_counter()."""

    name: str
    start: float
    stop: float


class Stage:
    """Times one stage as a context manager. A step has hundreds of stages, so this must be cheap.

    Reductions run in a worker thread: torch.profiler shows it with profile_all_threads=True.
    """

    __slots__ = ("_name", "_range", "_spans", "_start")

    def __init__(self, spans: list[Span], name: str) -> None:
        self._spans, self._name = spans, name
        self._range = _RecordFunctionFast(f"oktopk.{name}")

    def __enter__(self) -> None:
        self._range.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._spans.append(Span(self._name, self._start, time.perf_counter()))
        self._range.__exit__(*exception)


class Stopwatch:
    """The stages of one reduction, in the order they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def stage(self, name: str) -> Stage:
        return Stage(self.spans, name)

    def seconds(self, name: str) -> float:
        return sum(span.stop - span.start for span in self.spans if span.name == name)
