"""Simulate all algorithms on all numbers of ranks: choose the recorded size, record, and replay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from oktopk.algorithms import Algorithm, find_algorithm
from oktopk.engine.settings import Settings
from oktopk.tools.bench.gradients import Gradients
from oktopk.tools.crossover import Cost, overlapped_cost
from oktopk.tools.model_step import ModelStep

from .measure.costs import Costs
from .network import Network
from .trace.format import DECODE, Trace
from .trace.record import Recording, record
from .trace.replay import ReplayedStep, replay
from .trace.sizes import Scale

_ENTRIES, _ENTRIES_PER_REGION = 4100, 24
"""Smallest k to record. With fewer than about 4096 / P candidates, Ok-Topk finds its threshold in another way;
with fewer than about 20 per region, regions are uneven by chance, and it balances needlessly.
"""
_TENSOR_BYTES, _MESSAGE_BYTES = 2 << 30, 1 << 30
_ENTRY_BYTES = 24
"""Bytes per entry in memory while messages are forwarded: received, sent and decoded."""
_MANY = 128
"""From this many ranks on, record fewer steps: a step has P² messages."""

DENSE = "dense"
_UNLIMITED = 1e18
"""Bytes per second."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What to simulate."""

    ranks: Sequence[int]
    algorithms: Sequence[str]
    size: int
    density: float
    network: Network
    step: ModelStep | None = None
    """The model's step without communication; None for the exchange alone."""

    @property
    def k(self) -> float:
        return self.size * self.density


@dataclass(frozen=True)
class Answer:
    """The result for one algorithm on one number of ranks, per step; bytes are per rank."""

    ranks: int
    algorithm: str
    step: ReplayedStep
    """Mean over steps, including the share of steps with exact thresholds."""
    usual_seconds: float
    """Seconds of a step without exact thresholds."""
    exact_seconds: float | None
    """Seconds of a step with exact thresholds, if only some steps have them."""
    recorded_size: int
    recorded_k: int
    unlimited_seconds: float = 0.0
    """Seconds of the mean step on links of unlimited bandwidth."""

    def cost(self, question: Question) -> Cost:
        """The cost of a whole step of the model at any rate.

        Its bytes are those on the critical path: what the exchange gains if bandwidth is unlimited.
        """
        critical = (self.step.seconds - self.unlimited_seconds) * question.network.bandwidth
        compute, backward = (question.step.seconds, question.step.backward) if question.step else (0.0, 0.0)
        dense = self.algorithm == DENSE
        density, fusion = (1.0, 0) if dense else (question.density, Settings.fusion_entries)
        return overlapped_cost(
            *(compute, backward, self.unlimited_seconds, critical, question.size),
            density=density, fusion_entries=fusion,
        )  # fmt: skip


def simulate(question: Question, costs: Costs, on_progress: OnProgress = lambda _: None) -> list[Answer]:
    """Record and replay all combinations, from few ranks to many."""
    answers = []
    for world in sorted(question.ranks):
        for name in question.algorithms:
            on_progress(f"{name} on {world} rank{'s' * (world > 1)}")
            answers.append(answer(find_algorithm(name), world, question, costs))
    return answers


def answer(algorithm: Algorithm, world: int, question: Question, costs: Costs) -> Answer:
    drawn = Gradients(choose_recorded_size(algorithm, world, question), 0)
    few = world >= _MANY
    recording = record(algorithm, world, drawn, question.density, skipped=0 if few else 1, steady=1 if few else 3)
    return replay_recording(algorithm, recording, question, costs)


def replay_recording(algorithm: Algorithm, recording: Recording, question: Question, costs: Costs) -> Answer:
    """Replay the recorded steps on the network, at the requested size."""
    network = question.network
    usual, exact = _replay_steps(algorithm, recording, question, costs, network)
    unlimited = _replay_steps(algorithm, recording, question, costs, replace(network, bandwidth=_UNLIMITED))
    return Answer(
        len(recording.first), algorithm.name, _mean_step(algorithm, usual, exact), usual.seconds,
        exact.seconds if exact else None, recording.size, recording.k, _mean_step(algorithm, *unlimited).seconds,
    )  # fmt: skip


def _replay_steps(
    algorithm: Algorithm, recording: Recording, question: Question, costs: Costs, network: Network
) -> tuple[ReplayedStep, ReplayedStep | None]:
    """A usual step, and one with exact thresholds if only some steps have them."""
    scale, size = Scale(question.size / recording.size), question.size
    later = costs.prices(algorithm.name, size)
    usual = median_step([replay(traces, scale, network, later) for traces in recording.steady])
    if getattr(algorithm, "tau_prime", None) is None:
        return usual, None
    return usual, replay(recording.first, scale, network, costs.prices(algorithm.name, size, exact=True))


def _mean_step(algorithm: Algorithm, usual: ReplayedStep, exact: ReplayedStep | None) -> ReplayedStep:
    return usual if exact is None else mix(usual, exact, 1 / algorithm.tau_prime)  # type: ignore[attr-defined]


def median_step(steps: Sequence[ReplayedStep]) -> ReplayedStep:
    """The step with the median time."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def mix(usual: ReplayedStep, rare: ReplayedStep, share: float) -> ReplayedStep:
    """Mean over steps, a share of which are rare ones."""
    names = [field.name for field in fields(ReplayedStep)]
    return ReplayedStep(**{n: (1 - share) * getattr(usual, n) + share * getattr(rare, n) for n in names})


def choose_recorded_size(algorithm: Algorithm, world: int, question: Question) -> int:
    """Choose the size to record: large enough for a realistic pattern, small enough for memory, at most the
    requested.
    """
    k = max(_ENTRIES, _ENTRIES_PER_REGION * world)
    k = min(
        k,
        int(_MESSAGE_BYTES / (world * estimate_received_per_k(algorithm, world, question.density) * _ENTRY_BYTES)),
    )
    size = min(math.ceil(k / question.density), _TENSOR_BYTES // (8 * world), question.size)
    return max(size, math.ceil(1 / question.density))


def estimate_received_per_k(algorithm: Algorithm, world: int, density: float) -> float:
    """Estimate how many times k a rank receives, from its growth between 8 and 16 ranks."""
    if world <= 16:
        return float(world)
    drawn = Gradients(math.ceil(64 / density), 0)
    few, more = (
        _mean_received(record(algorithm, ranks, drawn, density, skipped=0, steady=1)) for ranks in (8, 16)
    )
    if not few:
        return 1.0
    return max(1.0, more * math.pow(world / 16, max(0.0, math.log2(more / few))))


def _mean_received(recording: Recording) -> float:
    """Entries that a rank decodes in a step, in units of k."""
    return statistics.mean(_count_decoded(trace) for trace in recording.steady[0]) / recording.k


def _count_decoded(trace: Trace) -> int:
    return sum(numbers[1] for kind, *numbers in trace.events() if kind == DECODE)
