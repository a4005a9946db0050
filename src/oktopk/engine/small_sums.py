"""Sums of small models: they cost rounds, not bytes, and the library's own takes many.

    ring         2 (P - 1) rounds that move n / P entries each: the library's own
    two rounds   part r goes to rank r, which adds up what it gets and sends that to everybody: as many bytes
    one round    everybody sends everything to everybody: P / 2 times as many bytes; not if that is too much

Which is the fastest is a matter of the link, the cores and the number of ranks: the clock decides. Ranks add in
the same order, so that all get the same bits; they are not those of the library.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Communicator
from ..metrics.traffic import Operation, ring_moves

SMALL_BYTES = 1 << 18
"""Up to which a sum is small."""
_ONE_ROUND_BYTES = 1 << 20
"""What a rank may send to do it in one round."""
_TRIES = 4
_REST = 1000
"""Sums until all ways are tried again; from then on twice as many each time."""

Wait = Callable[[], None]
Moved = tuple[int, int]
"""Bytes and messages that a rank sends."""


class Poster(Protocol):
    """Begins collectives of a library, at once and in the same order on all ranks. Call the result to wait."""

    def post_sum(self, x: Tensor, operation: Operation) -> Wait:
        """Sum x in its place."""

    def post_swap(self, received: Tensor, sent: Tensor, operation: Operation) -> Wait:
        """Part r of what is sent goes to rank r, and what rank r sends here becomes part r of `received`."""


class Race:
    """Ways that are tried in turn; then the fastest is taken for long. The same on all ranks, who count alike."""

    def __init__(self, ways: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(ways)]
        self._best, self._done, self._rest = 0, 0, _REST

    @property
    def way(self) -> int:
        return self._done % len(self._times) if self._done < _TRIES * len(self._times) else self._best

    def note(self, seconds: float, comm: Communicator) -> None:
        """What the way took; at the end of a race all ranks decide."""
        trials = _TRIES * len(self._times)
        if self._done < trials:
            self._times[self.way].append(seconds)
        self._done += 1
        if self._done == trials:
            own = torch.tensor([median(times) for times in self._times])
            everybody = torch.stack(comm.all_gather_sealed(own, own.nbytes, "small sums"))
            self._best = int(everybody.sum(0).argmin())
        elif self._done == trials + self._rest:
            self._times = [[] for _ in self._times]
            self._done, self._rest = 0, 2 * self._rest


class SmallSums:
    """Sums each by the way that was the fastest; `comm` is where ranks agree on it."""

    def __init__(self, comm: Communicator, poster: Poster, operation: Operation) -> None:
        self._comm, self._poster, self._operation = comm, poster, operation
        self._ways = self._ring, self._two_rounds, self._one_round
        self._race = Race(len(self._ways))

    def sum_(self, x: Tensor) -> Moved:
        """Over ranks, in its place. x is contiguous, in host memory, and not empty."""
        sum_ = self._ways[self._race.way]
        start = time.perf_counter()
        moved = sum_(x)
        self._race.note(time.perf_counter() - start, self._comm)
        return moved

    def _ring(self, x: Tensor) -> Moved:
        self._poster.post_sum(x, self._operation)()
        return ring_moves(x.nbytes, self._comm.world)

    def _two_rounds(self, x: Tensor) -> Moved:
        size, others = x.numel(), self._comm.world - 1
        part = x.new_empty(-(-size // self._comm.world))
        sent = x.new_zeros(part.numel() * self._comm.world)
        sent[:size] = x
        _add_up(self._swapped(sent), part)
        x.copy_(self._swapped(part.repeat(self._comm.world)).flatten()[:size])
        return 2 * part.nbytes * others, 2 * others

    def _one_round(self, x: Tensor) -> Moved:
        others = self._comm.world - 1
        if x.nbytes * others > _ONE_ROUND_BYTES:
            return self._two_rounds(x)
        _add_up(self._swapped(x.repeat(self._comm.world)), x)
        return x.nbytes * others, others

    def _swapped(self, sent: Tensor) -> Tensor:
        """What ranks sent here: [P, entries]."""
        received = torch.empty_like(sent)
        self._poster.post_swap(received, sent, self._operation)()
        return received.view(self._comm.world, -1)


def _add_up(parts: Tensor, out: Tensor) -> None:
    """One after the other, so that all processors do the same."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
