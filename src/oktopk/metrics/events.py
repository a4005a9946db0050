"""What happened: one event per reduction of a bucket and one per step, and where events go.

An event is written once all of a step is settled, before anybody who waits for the step goes on: whoever reads
a sink after the step's synchronisation finds all of it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from .traffic import Operation, Traffic, merge

Figures = TypeVar("Figures", bound="Additive")

DENSE, SPARSE = "dense", "sparse"
ENTRY_BYTES = 8
"""An int32 index and a float32 value: the payload formula, whatever the wire really carries."""


class Span(NamedTuple):
    """A stage of a reduction, in seconds of time.perf_counter()."""

    name: str
    start: float
    stop: float


class Additive:
    """Figures of buckets that add up, field by field, to those of a step."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __add__(self: Figures, more: Figures) -> Figures:
        return type(self)(*(getattr(self, name) + getattr(more, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Seconds(Additive):
    """Where the time of a reduction went. `wait` is for ranks that came late; `exchange` is the rest of the
    time spent in communication; `other` is everything that has no name, sums and copies above all."""

    select: float = 0.0
    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0
    wait: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.select + self.encode + self.exchange + self.decode + self.wait + self.other


@dataclass(frozen=True)
class Volume(Additive):
    """n and k, and the user's three figures made of them. `size` is n; `count` is k, the entries of the result:
    all of them where the exchange is dense. Volumes of buckets add up to that of a step."""

    size: int = 0
    count: int = 0
    payload_bytes: int = 0

    @classmethod
    def of(cls, size: int, count: int | None) -> Volume:
        """Of a sparse reduction with `count` entries in its result, or of a dense one (None)."""
        if count is None:
            return cls(size, size, 4 * size)
        return cls(size, count, ENTRY_BYTES * count)

    @property
    def sparsity(self) -> float:
        return 1.0 - self.count / self.size if self.size else 0.0

    @property
    def ratio(self) -> float:
        """n / k, and 1 when nothing at all was sent."""
        return self.size / self.count if self.count else 1.0


@dataclass(frozen=True)
class Wire(Additive):
    """Bytes and messages of one rank, headers and control included. `modelled` of the bytes belong to library
    collectives, whose inside cannot be seen: they are what the algorithm must send, a ring for its sums."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    control_bytes: int = 0
    """Of the bytes sent, those that carried no gradient: counts, boundaries, agreement."""
    modelled_bytes: int = 0
    """Of the bytes sent, those that were not counted but follow from the algorithm."""

    @classmethod
    def of(cls, traffic: Mapping[Operation, Traffic]) -> Wire:
        parts = (
            cls(
                moved.sent_bytes,
                moved.received_bytes,
                moved.sent_messages,
                moved.received_messages,
                control_bytes=moved.sent_bytes if operation.control else 0,
                modelled_bytes=moved.sent_bytes if moved.modelled else 0,
            )
            for operation, moved in traffic.items()
        )
        return _added(parts, cls())


class Densities:
    """Counts as shares of the whole."""

    volume: Volume
    target_count: int
    local_count: int

    @property
    def target_density(self) -> float:
        return self.target_count / self.volume.size if self.volume.size else 1.0

    @property
    def local_density(self) -> float:
        """What this rank really sent."""
        return self.local_count / self.volume.size if self.volume.size else 1.0

    @property
    def global_density(self) -> float:
        """That of the result: up to P times the local one."""
        return self.volume.count / self.volume.size if self.volume.size else 1.0


@dataclass(frozen=True)
class ReductionEvent(Densities):
    """One bucket, or a group of buckets that shared messages, in one step, on one rank."""

    step: int
    bucket: int
    phase: str
    """dense or sparse."""
    algorithm: str
    volume: Volume
    target_count: int
    """k that the density asked for; n when dense."""
    local_count: int
    """How many entries this rank sent."""
    threshold: float
    global_threshold: float
    exact: bool
    """The local threshold was evaluated over all entries."""
    residual_norm: float
    """When it was last measured: on every step of a small bucket, now and then of a large one."""
    wire: Wire
    seconds: Seconds
    slowest_rank: int | None
    """The rank that came last, if the messages told."""
    skipped: bool
    """Nothing of it was applied: some rank met a number that is not finite, in this bucket or another one."""
    start: float = 0.0
    stop: float = 0.0
    """When, in seconds of time.perf_counter()."""
    spans: tuple[Span, ...] = ()
    traffic: Mapping[Operation, Traffic] = field(default_factory=dict, repr=False)
    """What `wire` sums up, by operation, with the sizes of messages."""


@dataclass(frozen=True)
class StepEvent(Densities):
    """All buckets of one step, on one rank."""

    step: int
    phase: str
    """dense or sparse; sparse if any bucket was."""
    volume: Volume
    target_count: int
    local_count: int
    residual_norm: float
    wire: Wire
    seconds: Seconds
    slowest_rank: int | None
    skipped: bool
    culprits: tuple[str, ...]
    """Of a skipped step: where the numbers that are not finite were, as "rank 2: layer.weight"."""
    start: float
    """When the first bucket was handed in, in seconds of time.perf_counter()."""
    handed_over: float
    """When the last bucket was handed in: the end of backward, as far as the reducer can see."""
    stop: float
    reductions: tuple[ReductionEvent, ...] = field(default=(), repr=False)

    @property
    def traffic(self) -> dict[Operation, Traffic]:
        return merge(part.traffic for part in self.reductions)

    @property
    def exposed(self) -> float:
        """Seconds that training waited for the reductions after backward had ended."""
        return max(0.0, self.stop - self.handed_over)

    @property
    def hidden_share(self) -> float:
        """The part of the reductions' time that training did not wait for, from 0 to 1."""
        busy = self.seconds.total
        return min(1.0, max(0.0, 1.0 - self.exposed / busy)) if busy > 0 else 0.0


class MetricsSink(Protocol):
    """Takes one step at a time; the events of its buckets are in `event.reductions`."""

    def emit(self, event: StepEvent) -> None: ...

    def close(self) -> None: ...


def _added(figures: Iterable[Figures], nothing: Figures) -> Figures:
    """Their sum, at no cost for a single one: a small model has one bucket, and short steps."""
    first, *rest = [*figures] or [nothing]
    return sum(rest, first)


def combine(step: int, reductions: Iterable[ReductionEvent], **rest: object) -> StepEvent:
    """The step that these reductions make."""
    parts = tuple(reductions)
    told = [part for part in parts if part.slowest_rank is not None]
    late = max(told, key=lambda part: part.seconds.wait) if told else None
    return StepEvent(
        step=step,
        phase=SPARSE if any(part.phase == SPARSE for part in parts) else DENSE,
        volume=_added((part.volume for part in parts), Volume()),
        target_count=sum(part.target_count for part in parts),
        local_count=sum(part.local_count for part in parts),
        residual_norm=math.hypot(*(part.residual_norm for part in parts)),
        wire=_added((part.wire for part in parts), Wire()),
        seconds=_added((part.seconds for part in parts), Seconds()),
        slowest_rank=None if late is None else late.slowest_rank,
        reductions=parts,
        **rest,  # type: ignore[arg-type]
    )


class Told:
    """A step whose event is made when somebody asks for it: that takes as long as the step of a small model."""

    def __init__(self, tell: Callable[[], StepEvent]) -> None:
        self._tell = tell

    @cached_property
    def event(self) -> StepEvent:
        return self._tell()
