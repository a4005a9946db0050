"""The end of a step on a host: what the leader tells, what members make of it, and what both have to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..errors import WireError
from ..metrics.events import ReductionEvent, Seconds, Volume, Wire
from ..metrics.traffic import merge, total
from .bucket_state import BucketResult
from .hosts import Host

_FACTS = ("bucket", "phase", "algorithm", "target_count")


def tell(
    host: Host, settled: Sequence[BucketResult], events: Sequence[ReductionEvent], culprits: Sequence[str] | None
) -> None:
    """As the leader: the results, unless something was not finite, and what the members need to know besides."""
    buckets = [
        {
            "index": one.lane.index,
            "count": 0 if culprits is not None else host.leave(one.lane.bucket, one.grad, one.places),
            "goes_dense": one.lane.choice.dense,
            "seconds": one.lane.choice.agreed,
        }
        for one in settled
    ]
    facts = [
        {"volume": asdict(event.volume), **{name: getattr(event, name) for name in _FACTS}} for event in events
    ]
    host.tell({"culprits": culprits, "buckets": buckets, "reductions": facts})


def hear(host: Host, settled: Sequence[BucketResult], step: int) -> tuple[list[str] | None, list[ReductionEvent]]:
    """As a member: put the results in place. Returns where something was not finite, and the step's reductions."""
    told = host.hear()
    lanes = {one.lane.index: one for one in settled}
    try:
        for word in told["buckets"]:
            one = lanes[word["index"]]
            one.lane.choice.dense, one.lane.choice.agreed = word["goes_dense"], tuple(word["seconds"])
            if told["culprits"] is None:
                host.take(one.lane.bucket, one.grad, word["count"])
        return told["culprits"], [_event(step, facts) for facts in told["reductions"]]
    except (KeyError, TypeError) as error:
        raise WireError(f"rank {host.leader} sent something unreadable about step {step}: {error!r}") from error


def _event(step: int, facts: dict[str, Any]) -> ReductionEvent:
    """A reduction as the leader has told of it; this rank has sent nothing itself."""
    known = {name: facts[name] for name in _FACTS}
    return ReductionEvent(
        step=step, volume=Volume(**facts["volume"]), local_count=0, threshold=0.0, global_threshold=0.0,
        exact=False, residual_norm=0.0, wire=Wire(), seconds=Seconds(), slowest_rank=None, skipped=False, **known,
    )  # fmt: skip


def with_host(host: Host, events: Sequence[ReductionEvent]) -> list[ReductionEvent]:
    """The events, the first of which now has what the step has cost inside the host."""
    first, *rest = events
    busy, memory, words = host.spent()
    talking = total(words).seconds
    return [
        replace(
            first,
            seconds=first.seconds + Seconds(exchange=talking, other=max(0.0, busy - talking)),
            wire=first.wire + Wire.of(words),
            traffic=merge([first.traffic, words, memory]),
        ),
        *rest,
    ]
