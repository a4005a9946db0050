"""Run real reductions on ranks that are threads of this process, and record their messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from oktopk.algorithms import Algorithm, Dense, Reduction, TopkA
from oktopk.algorithms.base import reduce_step
from oktopk.algorithms.selection import target_count
from oktopk.comm import Communicator, alone, run_threads
from oktopk.feedback.accumulator import Accumulator
from oktopk.metrics.traffic import Stopwatch
from oktopk.tools.bench.gradients import Gradients
from oktopk.wire.sparse_comm import SparseCommunicator

from .format import RecordingCommunicator, Trace

_TIMEOUT = 1200.0
"""Seconds that a rank waits for a message: all others may run first, one by one."""
AGE = 8
"""Steps that a rank does alone before recording or timing starts."""


class RankReducer:
    """One rank that reduces one bucket of gradients step by step, as the engine does."""

    def __init__(self, comm: Communicator, algorithm: Algorithm, gradients: Gradients, density: float) -> None:
        self.comm, self.algorithm, self.gradients, self.density = comm, algorithm, gradients, density
        self.size = gradients.buffer.numel()
        self.k = target_count(self.size, density)
        self.residual = None if isinstance(algorithm, Dense) else torch.zeros(self.size)
        self.state: Any = None
        self.gradient = gradients.buffer

    def age(self, steps: int) -> None:
        """Do some steps alone, because residuals and thresholds grow unusually fast in the first steps."""
        if self.residual is None:
            return
        single = RankReducer(alone(), TopkA(), self.gradients, self.density)
        single.residual = self.residual
        for step in range(steps):
            single.prepare(step)
            single.reduce(step)

    def prepare(self, step: int) -> None:
        """Draw the gradient of a step, which is not part of the reduction."""
        self.gradient = self.gradients.at(step)

    def reduce(self, step: int, stopwatch: Stopwatch | None = None) -> Reduction:
        channel = SparseCommunicator(self.comm, self.size, step=step, stopwatch=stopwatch)
        acc = Accumulator([self.gradient], [] if self.residual is None else [self.residual])
        reduction, _ = reduce_step(self.algorithm, channel, acc, self.k, self.state)
        self.state = reduction.state
        return reduction


def rank_gradients(drawn: Gradients, rank: int) -> Gradients:
    """A rank's gradients from a shared draw, through its own windows, so that memory is needed once."""
    own = copy(drawn)
    generator = torch.Generator().manual_seed(rank)
    own.offsets = torch.randint(0, drawn.buffer.numel(), (len(drawn.offsets),), generator=generator).tolist()
    own.buffer = torch.empty_like(drawn.buffer)
    return own


def finish_trace(recorded: RecordingCommunicator, reduction: Reduction) -> Trace:
    """Finish the trace of a step; also records the summation of its result."""
    recorded.record_add(sum(map(len, reduction.parts)))
    return recorded.take()


@dataclass(frozen=True)
class Recording:
    """The traces of all ranks, for the first step, which has exact thresholds, and for later ones."""

    size: int
    k: int
    first: list[Trace]
    steady: list[list[Trace]]


def record(
    algorithm: Algorithm, world: int, drawn: Gradients, density: float, *, skipped: int = 1, steady: int = 3
) -> Recording:
    """Record the first step, skip `skipped` steps, and record `steady` more."""

    def rank(comm: Communicator) -> list[Trace]:
        with torch.no_grad():
            recorded = RecordingCommunicator(comm)
            reducing = RankReducer(recorded, algorithm, rank_gradients(drawn, comm.rank), density)
            reducing.age(AGE)
            traces = []
            for step in range(1 + skipped + steady):
                reducing.prepare(AGE + step)
                trace = finish_trace(recorded, reducing.reduce(AGE + step))
                if step == 0 or step > skipped:
                    traces.append(trace)
            return traces

    with _one_thread():
        by_rank = run_threads(world, rank, _TIMEOUT, in_turns=True)
    first, *later = ([traces[step] for traces in by_rank] for step in range(1 + steady))
    size = drawn.buffer.numel()
    return Recording(size, target_count(size, density), first, later)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: each rank would start as many as there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
