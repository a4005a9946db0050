"""The ranks of a host as one: reduce inside, exchange between leaders, broadcast the sparse result back.

    host 0    rank 2 ──► rank 1 ──► rank 0     the leader: it has the residual
                                      ▲
                                      │        sparse or dense, between leaders only
                                      ▼
    host 1    rank 5 ──► rank 4 ──► rank 3

A sum passes along the host: the last rank sends its share of the gradient, the others add theirs. At the end of
the step the leader publishes the results, and the members put them in place. Tensors go through shared memory if
the ranks have memory in common, and otherwise in messages of the host's subgroup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ...comm import Metered, Subset
from ...errors import WireError
from ...feedback.buckets import Bucket
from ...metrics.events import ReductionEvent, Seconds, Volume, make_event
from ...metrics.traffic import merge, total
from ...utils.timeouts import TIMEOUTS
from ..autotune import Autotune
from ..bucket_state import BucketResult
from ..recorder import add_traffic
from .links import RESULT, LocalLinks, LocalTransport, SubgroupTransport
from .shared_memory import SharedMemoryTransport, find_problem

_log = logging.getLogger(__name__)

_FACTS = ("bucket", "phase", "algorithm", "target_count")
"""What members are told of a reduction, beside its volume."""


class LocalGroup:
    """The ranks of a host, as one of them sees it.

    Args:
        comm: all ranks of the job, numbered host by host.
        ranks: how many of them are on each host.
    """

    def __init__(self, comm: Metered, ranks: int) -> None:
        if comm.world % ranks:
            raise ValueError(
                f"ranks_per_host is {ranks}, but the number of ranks, {comm.world}, is no multiple of it"
            )
        self._comm, self._ranks = comm, ranks
        self._leader = comm.rank - comm.rank % ranks
        self._members = range(self._leader, self._leader + ranks)
        self._links = LocalLinks(comm)
        self._transport: LocalTransport | None = None
        self._busy = 0.0
        between = range(0, comm.world, ranks) if self.leads else [comm.rank]
        self.leaders = Metered(Subset(comm.inner, between, TIMEOUTS.between_hosts * comm.timeout))
        """The leaders of all hosts among themselves; a member has nobody to talk to there."""

    @property
    def leads(self) -> bool:
        return self._comm.rank == self._leader

    def __str__(self) -> str:
        return f"ranks {self._members[0]} to {self._members[-1]}"

    def reduce(self, bucket: Bucket, grad: Tensor) -> None:
        """Average inside the host: `grad` becomes the mean on the leader, and zero on members."""
        with self._timed():
            transport, rank, share = self._connected(), self._comm.rank, 1.0 / self._ranks
            dtype = torch.promote_types(grad.dtype, torch.float32)
            own, last = grad.to("cpu", dtype), rank == self._members[-1]
            if last:
                mean = torch.mul(own, share, out=transport.sum_buffer(bucket, dtype))
            else:
                mean = transport.recv_sum(bucket, dtype, rank + 1, self._patience(rank))
            if not self.leads:
                transport.send_sum(bucket, mean if last else mean.add_(own, alpha=share), rank - 1)
                grad.zero_()
            elif own is grad:
                torch.add(mean, grad, alpha=share, out=grad)
            else:
                grad.copy_(mean.add_(own, alpha=share))

    def _patience(self, rank: int) -> float:
        """In timeouts: whoever waits for a rank that waits must not be the first to give up."""
        return 1 + (TIMEOUTS.between_hosts - 1) * (self._members[-1] - 1 - rank) / self._ranks

    def _connected(self) -> LocalTransport:
        if self._transport is None:
            problem = find_problem(self._links, self._members)
            if problem is None:
                self._transport = SharedMemoryTransport(self._links, self._members)
            else:
                self._transport = SubgroupTransport(self._links)
                if self.leads:
                    _log.warning(
                        "oktopk: %s average in messages, which is slower than shared memory: %s. Ranks must be "
                        "numbered host by host, ranks_per_host of them on each", self, problem,
                    )  # fmt: skip
        return self._transport

    # The end of a step.

    def publish(
        self, results: Sequence[BucketResult], events: Sequence[ReductionEvent], autotune: Autotune,
        culprits: Sequence[str] | None,
    ) -> None:  # fmt: skip
        """As the leader: send members the results, unless the step is skipped, and what they need to know."""
        with self._timed():
            # Members have them in this order.
            results = sorted(results, key=lambda result: result.handed.state.index)
            parts = [[] if culprits is not None else _entries(result) for result in results]
            facts = [
                {"volume": asdict(event.volume), **{name: getattr(event, name) for name in _FACTS}}
                for event in events
            ]
            outcome = {
                "culprits": culprits, "reductions": facts, "autotune": autotune.decision(),
                "results": [[part.numel() for part in tensors] for tensors in parts],
            }  # fmt: skip
            entries = [(result.handed.state.bucket, part) for result, part in zip(results, parts, strict=True)]
            self._connected().publish(outcome, entries, self._members[1:])

    def receive(
        self, results: Sequence[BucketResult], autotune: Autotune, step: int
    ) -> tuple[list[str] | None, list[ReductionEvent]]:
        """As a member: put the results in place. Returns where numbers were not finite, and the reductions."""
        with self._timed():
            outcome = self._links.recv_json(self._leader, RESULT, TIMEOUTS.for_leader)
            try:
                autotune.load_state_dict(outcome["autotune"])
                for result, counts in zip(results, outcome["results"], strict=True):
                    self._receive_entries(result, counts)
                return outcome["culprits"], [_member_event(step, facts) for facts in outcome["reductions"]]
            except (KeyError, TypeError, ValueError) as error:
                raise WireError(
                    f"rank {self._leader} sent an unreadable outcome of step {step}: {error!r}"
                ) from error

    def _receive_entries(self, result: BucketResult, counts: Sequence[int]) -> None:
        if not counts:
            return
        state, grad, _ = result.handed
        types = [grad.dtype] if len(counts) == 1 else [torch.int64, grad.dtype]
        shapes = list(zip(counts, types, strict=True))
        found = self._connected().receive(state.bucket, shapes, self._leader)
        if len(found) == 1:
            grad.copy_(found[0])
        else:
            grad.index_copy_(0, found[0].to(grad.device), found[1].to(grad.device))

    def abandon(self) -> None:
        """Wait until the leader has rolled the step back: it has read where the next gradients go."""
        with self._timed():
            if not self.leads:
                self._links.recv_json(self._leader, RESULT, TIMEOUTS.for_leader)
                return
            for rank in self._members[1:]:
                self._links.send_json("abandoned", rank, RESULT)

    # What it costs.

    def add_costs(self, events: Sequence[ReductionEvent]) -> list[ReductionEvent]:
        """The events; the first one now has what the step has cost inside the host."""
        first, *rest = events
        words, moved = self._comm.pop_traffic(), self._connected().pop_traffic()
        first = add_traffic(first, words)
        seconds = first.seconds + Seconds(other=max(0.0, self._busy - total(words).seconds))
        self._busy = 0.0
        return [replace(first, seconds=seconds, traffic=merge([first.traffic, moved])), *rest]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._busy += time.perf_counter() - start


def _entries(result: BucketResult) -> list[Tensor]:
    """A result as (indices, values) where that is smaller, otherwise as it is."""
    grad = result.handed.grad
    if result.nonzeros is not None:
        count = sum(part.numel() for part in result.nonzeros)
        if (8 + grad.itemsize) * count <= grad.nbytes:
            indices = torch.cat([part.to("cpu", torch.int64) for part in result.nonzeros])
            return [indices, grad[indices.to(grad.device)].cpu()]
    return [grad.cpu()]


def _member_event(step: int, facts: dict[str, Any]) -> ReductionEvent:
    """A reduction as the leader tells of it; this rank has sent nothing itself."""
    return make_event(step=step, volume=Volume(**facts["volume"]), **{name: facts[name] for name in _FACTS})
