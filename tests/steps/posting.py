"""A library of collectives for the reducer of steps, on ranks as threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import oktopk
from oktopk.metrics.traffic import Operation


class Poster:
    """A library whose collectives are those of the communicator; they are done when somebody waits."""

    def __init__(self, comm: oktopk.Communicator) -> None:
        self.comm = comm

    def post_sum(self, x: Tensor, operation: Operation) -> Callable[[], None]:
        return lambda: self.comm.all_reduce_(x, operation.phase)

    def post_swap(self, received: Tensor, sent: Tensor, operation: Operation) -> Callable[[], None]:
        def swap() -> None:
            rows = self.comm.all_gather_sealed(sent, sent.nbytes, operation.phase)
            part = sent.numel() // self.comm.world
            received.copy_(torch.cat([row[part * self.comm.rank :][:part] for row in rows]))

        return swap
