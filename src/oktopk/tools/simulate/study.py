"""All algorithms on all numbers of ranks: what is recorded at which size, and what the model makes of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from oktopk.algorithms import Algorithm, find_algorithm
from oktopk.tools.bench.gradients import Gradients

from .measure.costs import Costs
from .network import Network
from .trace.format import DECODE, Trace
from .trace.record import Recording, record
from .trace.replay import Replayed, replay
from .trace.sizes import Scale

_ENTRIES, _ENTRIES_PER_REGION = 4100, 24
"""The least k to record. With fewer than about 4096 / P candidates, Ok-Topk finds its threshold in another way;
with fewer than about 20 in a region, chance makes regions uneven, and it balances what would need no balance."""
_TENSOR_BYTES, _MESSAGE_BYTES = 2 << 30, 1 << 30
_ENTRY_BYTES = 24
"""In memory while messages are passed on: as received, as sent on, decoded."""
_MANY = 128
"""Ranks from which on fewer steps are recorded: a step has P² messages."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is to be simulated."""

    ranks: Sequence[int]
    algorithms: Sequence[str]
    size: int
    density: float
    network: Network

    @property
    def k(self) -> float:
        return self.size * self.density


@dataclass(frozen=True)
class Answer:
    """One algorithm on one number of ranks. Everything is per step; what is sent, per rank."""

    ranks: int
    algorithm: str
    step: Replayed
    """The mean over steps; those that evaluate thresholds exactly have their share in it."""
    usual_seconds: float
    """Of a step that does not."""
    exact_seconds: float | None
    """Of a step that evaluates thresholds exactly, where only some do."""
    recorded_size: int
    recorded_k: int


def simulate(question: Question, costs: Costs, note: Note = lambda _: None) -> list[Answer]:
    """Record and replay, from few ranks to many."""
    answers = []
    for world in sorted(question.ranks):
        for name in question.algorithms:
            note(f"{name} on {world} rank{'s' * (world > 1)}")
            answers.append(answer(find_algorithm(name), world, question, costs))
    return answers


def answer(algorithm: Algorithm, world: int, question: Question, costs: Costs) -> Answer:
    drawn = Gradients(recorded_size(algorithm, world, question), 0)
    few = world >= _MANY
    recording = record(algorithm, world, drawn, question.density, skipped=0 if few else 1, steady=1 if few else 3)
    return price(algorithm, recording, question, costs)


def price(algorithm: Algorithm, recording: Recording, question: Question, costs: Costs) -> Answer:
    """What the recorded steps come to on the network and at the size that was asked for."""
    scale, network, size = Scale(question.size / recording.size), question.network, question.size
    later = costs.prices(algorithm.name, size)
    usual = steady = middle([replay(traces, scale, network, later) for traces in recording.steady])
    every = getattr(algorithm, "tau_prime", None)
    exact = None
    if every is not None:
        exact = replay(recording.first, scale, network, costs.prices(algorithm.name, size, exact=True))
        steady = mixed(steady, exact, 1 / every)
    return Answer(
        len(recording.first), algorithm.name, steady, usual.seconds, exact.seconds if exact else None,
        recording.size, recording.k,
    )  # fmt: skip


def middle(steps: Sequence[Replayed]) -> Replayed:
    """The one whose time is the median."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def mixed(usual: Replayed, rare: Replayed, share: float) -> Replayed:
    """The mean over steps of which a share are rare ones."""
    names = [field.name for field in fields(Replayed)]
    return Replayed(**{n: (1 - share) * getattr(usual, n) + share * getattr(rare, n) for n in names})


def recorded_size(algorithm: Algorithm, world: int, question: Question) -> int:
    """Large enough for a true pattern, small enough for the memory of one machine, and never more than asked."""
    k = max(_ENTRIES, _ENTRIES_PER_REGION * world)
    k = min(k, int(_MESSAGE_BYTES / (world * received_per_k(algorithm, world, question.density) * _ENTRY_BYTES)))
    size = min(math.ceil(k / question.density), _TENSOR_BYTES // (8 * world), question.size)
    return max(size, math.ceil(1 / question.density))


def received_per_k(algorithm: Algorithm, world: int, density: float) -> float:
    """How many times k a rank receives, told by how that grows from 8 ranks to 16."""
    if world <= 16:
        return float(world)
    drawn = Gradients(math.ceil(64 / density), 0)
    few, more = (_received(record(algorithm, ranks, drawn, density, skipped=0, steady=1)) for ranks in (8, 16))
    if not few:
        return 1.0
    return max(1.0, more * math.pow(world / 16, max(0.0, math.log2(more / few))))


def _received(recording: Recording) -> float:
    """Entries decoded by a rank in a step, in units of k."""
    return statistics.mean(_decoded(trace) for trace in recording.steady[0]) / recording.k


def _decoded(trace: Trace) -> int:
    return sum(numbers[1] for kind, *numbers in trace.events() if kind == DECODE)
