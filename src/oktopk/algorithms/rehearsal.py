"""Compile the kernels of an algorithm before a step needs them."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import Communicator, Metered, run_threads
from ..feedback.accumulator import Accumulator
from ..wire.codecs import ValueCodec, find_values
from ..wire.sparse_comm import SparseCommunicator
from .base import Algorithm, reduce_step
from .selection import target_count

_SIZES = (64, 10_000, 200_000)
_DENSITY = 0.02
_STEPS = 3
_RANKS = 2


def compile_kernels(algorithm: Algorithm, values: str | ValueCodec) -> None:
    """Reduce random gradients on ranks that are threads of this process: every kernel that is used compiles."""

    def rank(comm: Communicator) -> None:
        random, state = torch.Generator().manual_seed(comm.rank), None
        residuals: list[Any] = [torch.zeros(size) for size in _SIZES]
        for step in range(_STEPS):
            acc = Accumulator([torch.randn(size, generator=random) for size in _SIZES], residuals)
            channel = SparseCommunicator(Metered(comm), acc.size, step=step, values=find_values(values))
            k = target_count(acc.size, _DENSITY)
            state = reduce_step(algorithm, channel, acc, k, state)[0].state

    run_threads(_RANKS, rank)
