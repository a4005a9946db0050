"""Events: one for each reduction of a bucket, one for each step, and the interface of a sink.

Sinks receive the event of a step after all its buckets are committed or rolled back, and before the step's
synchronisation returns: code that reads a sink after that finds the step in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from .traffic import Operation, Span, Traffic, merge, total

Figures = TypeVar("Figures", bound="Additive")

DENSE, SPARSE = "dense", "sparse"
ENTRY_BYTES = 8
"""An int32 index and a float32 value: the unit of `payload_bytes`, whatever format the wire uses."""


class Additive:
    """Figures that add up field by field, from buckets to a step."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __add__(self: Figures, more: Figures) -> Figures:
        return type(self)(*(getattr(self, name) + getattr(more, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Seconds(Additive):
    """Where the time of a reduction went.

    Attributes:
        select: Accumulation and selection.
        encode: Encoding messages.
        exchange: Communication, without the waiting.
        decode: Decoding messages.
        wait: Waiting for stragglers.
        other: Everything else, mostly sums and copies.
    """

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
    """How much of a bucket or a step was exchanged.

    Attributes:
        size: n, the number of entries.
        count: k, the non-zero entries of the result; n if the exchange is dense.
        payload_bytes: 8 bytes (index and value) for each of k entries, or 4 for each of n if dense.
    """

    size: int = 0
    count: int = 0
    payload_bytes: int = 0

    @classmethod
    def of(cls, size: int, count: int | None) -> Volume:
        """The volume of a sparse reduction with `count` entries in its result, or of a dense one (None)."""
        if count is None:
            return cls(size, size, 4 * size)
        return cls(size, count, ENTRY_BYTES * count)

    @property
    def sparsity(self) -> float:
        return 1.0 - self.count / self.size if self.size else 0.0

    @property
    def ratio(self) -> float:
        """The compression ratio n / k; 1 if nothing was sent."""
        return self.size / self.count if self.count else 1.0


@dataclass(frozen=True)
class Wire(Additive):
    """Bytes and messages of one rank, headers and control messages included.

    Attributes:
        sent_bytes: Bytes sent.
        received_bytes: Bytes received.
        sent_messages: Messages sent.
        received_messages: Messages received.
        control_bytes: The part of sent_bytes that carried no gradient: counts, region edges, agreement.
        modelled_bytes: The part of sent_bytes that was computed, not counted: a dense all-reduce of the transport
            is assumed to be a ring.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    control_bytes: int = 0
    modelled_bytes: int = 0

    @classmethod
    def of(cls, traffic: Mapping[Operation, Traffic]) -> Wire:
        moved = total(traffic)
        control = sum(part.sent_bytes for operation, part in traffic.items() if operation.control)
        modelled = sum(part.sent_bytes for part in traffic.values() if part.modelled)
        counts = moved.sent_bytes, moved.received_bytes, moved.sent_messages, moved.received_messages
        return cls(*counts, control, modelled)


class Densities:
    """Counts as shares of the number of entries."""

    volume: Volume
    target_count: int
    local_count: int

    @property
    def target_density(self) -> float:
        return self.target_count / self.volume.size if self.volume.size else 1.0

    @property
    def local_density(self) -> float:
        """The share of the entries that this rank sent."""
        return self.local_count / self.volume.size if self.volume.size else 1.0

    @property
    def global_density(self) -> float:
        """The share of the entries that the result has: up to P times the local density."""
        return self.volume.count / self.volume.size if self.volume.size else 1.0


@dataclass(frozen=True)
class ReductionEvent(Densities):
    """One bucket, or a fused group of buckets, in one step on one rank.

    Attributes:
        step: Number of the step, from 0.
        bucket: Index of the bucket; of a fused group, of its first bucket.
        phase: "dense" or "sparse".
        algorithm: Name of the algorithm.
        volume: Entries, non-zeros of the result, payload.
        target_count: k that the density asks for; n if dense.
        local_count: Entries that this rank sent.
        threshold: Magnitude from which on this rank selected.
        global_threshold: Magnitude from which on sums survived, for Ok-Topk.
        exact: The local threshold was evaluated over all entries.
        residual_norm: L2 norm of the residual when it was last measured: on every step for a small bucket, less
            often for a large one.
        wire: Bytes and messages.
        seconds: Time by stage.
        slowest_rank: The straggler, if the messages reveal it.
        skipped: The step was rolled back: some rank had a non-finite number in this or another bucket.
        start: When it began, in seconds of time.perf_counter().
        stop: When it ended.
        spans: Every stage with its start and stop.
        traffic: The figures of `wire` by operation, with message sizes.

    Example:
        >>> import oktopk
        >>> import torch
        >>> from oktopk.metrics.sinks import MemorySink
        >>> sink = MemorySink()
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with oktopk.AllReducer(parameters, density=0.1, warmup_steps=0, sinks=[sink]) as reducer:
        ...     grads = reducer.sync({"w": torch.arange(50.0)})
        >>> event = sink.reductions[0]
        >>> event.phase, event.target_count, event.local_count, event.skipped
        ('sparse', 5, 5, False)
    """

    step: int
    bucket: int
    phase: str
    algorithm: str
    volume: Volume
    target_count: int
    local_count: int
    threshold: float
    global_threshold: float
    exact: bool
    residual_norm: float
    wire: Wire
    seconds: Seconds
    slowest_rank: int | None
    skipped: bool
    start: float = 0.0
    stop: float = 0.0
    spans: tuple[Span, ...] = ()
    traffic: Mapping[Operation, Traffic] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class StepEvent(Densities):
    """All buckets of one step on one rank.

    Attributes:
        step: Number of the step, from 0.
        phase: "sparse" if any bucket was sparse, otherwise "dense".
        volume: Sum over the buckets.
        target_count: Sum over the buckets.
        local_count: Sum over the buckets.
        residual_norm: L2 norm over the buckets.
        wire: Sum over the buckets.
        seconds: Sum over the buckets.
        slowest_rank: The straggler of the bucket that waited longest.
        skipped: The step was rolled back on every rank, because some rank had a non-finite number.
        culprits: Of a skipped step: the parameters that were non-finite, as "rank 2: layer.weight".
        start: When the first bucket was submitted, in seconds of time.perf_counter().
        handed_over: When the last bucket was submitted: the end of backward, as far as the reducer can see.
        stop: When all buckets were committed or rolled back.
        reductions: The events of the buckets.

    Example:
        >>> import oktopk
        >>> import torch
        >>> from oktopk.metrics.sinks import MemorySink
        >>> sink = MemorySink()
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with oktopk.AllReducer(parameters, density=0.1, warmup_steps=0, sinks=[sink]) as reducer:
        ...     grads = reducer.sync({"w": torch.full((50,), float("nan"))})
        >>> event = sink.steps[0]
        >>> event.phase, event.skipped, event.culprits
        ('sparse', True, ('rank 0: w',))
    """

    step: int
    phase: str
    volume: Volume
    target_count: int
    local_count: int
    residual_norm: float
    wire: Wire
    seconds: Seconds
    slowest_rank: int | None
    skipped: bool
    culprits: tuple[str, ...]
    start: float
    handed_over: float
    stop: float
    reductions: tuple[ReductionEvent, ...] = field(default=(), repr=False)

    @property
    def traffic(self) -> dict[Operation, Traffic]:
        """Bytes, messages and seconds by operation, over all buckets."""
        return merge(part.traffic for part in self.reductions)

    @property
    def exposed(self) -> float:
        """Seconds that training waited for reductions after the end of backward."""
        return max(0.0, self.stop - self.handed_over)

    @property
    def hidden_share(self) -> float:
        """The share of the reductions' time that overlapped with backward, from 0 to 1."""
        busy = self.seconds.total
        return min(1.0, max(0.0, 1.0 - self.exposed / busy)) if busy > 0 else 0.0


def make_event(**facts: Any) -> ReductionEvent:
    """An event; what is not given did not happen on this rank."""
    nothing: dict[str, Any] = {
        "local_count": 0, "threshold": 0.0, "global_threshold": 0.0, "exact": False, "residual_norm": 0.0,
        "wire": Wire(), "seconds": Seconds(), "slowest_rank": None, "skipped": False,
    }  # fmt: skip
    return ReductionEvent(**(nothing | facts))


class MetricsSink(Protocol):
    """The interface of a sink: any object with these two methods can be passed in `sinks=`.

    oktopk.metrics.sinks has sinks for memory, CSV, JSON lines, TensorBoard and Perfetto.

    Example:
        >>> import oktopk
        >>> import torch
        >>> class PrintSink:
        ...     def emit(self, event):
        ...         print(f"step {event.step}: {event.phase}, {event.volume.payload_bytes} bytes")
        ...     def close(self):
        ...         print("closed")
        >>> parameters = [("w", torch.nn.Parameter(torch.ones(50)))]
        >>> with oktopk.AllReducer(parameters, density=0.1, sinks=[PrintSink()]) as reducer:
        ...     grads = reducer.sync({"w": torch.ones(50)})
        step 0: dense, 200 bytes
        closed
    """

    def emit(self, event: StepEvent) -> None:
        """Record one step. The events of its buckets are in `event.reductions`. Called from a worker thread."""

    def close(self) -> None:
        """Release files and other resources. The front end calls it when it closes."""


def _sum_figures(figures: Iterable[Figures], nothing: Figures) -> Figures:
    """Sum the figures. A single one costs nothing: a small model has one bucket and short steps."""
    first, *rest = [*figures] or [nothing]
    return sum(rest, first)


def combine(step: int, reductions: Iterable[ReductionEvent], **rest: object) -> StepEvent:
    """Combine the reductions of a step into its event; `rest` has the fields that do not follow from them."""
    parts = tuple(reductions)
    known = [part for part in parts if part.slowest_rank is not None]
    late = max(known, key=lambda part: part.seconds.wait) if known else None
    return StepEvent(
        step=step,
        phase=SPARSE if any(part.phase == SPARSE for part in parts) else DENSE,
        volume=_sum_figures((part.volume for part in parts), Volume()),
        target_count=sum(part.target_count for part in parts),
        local_count=sum(part.local_count for part in parts),
        residual_norm=math.hypot(*(part.residual_norm for part in parts)),
        wire=_sum_figures((part.wire for part in parts), Wire()),
        seconds=_sum_figures((part.seconds for part in parts), Seconds()),
        slowest_rank=None if late is None else late.slowest_rank,
        reductions=parts,
        **rest,  # type: ignore[arg-type]
    )
