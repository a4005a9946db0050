"""Dense: the ordinary all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..feedback.accumulator import Accumulator
from ..wire.sparse_comm import SparseCommunicator
from ..wire.sparse_vector import all_finite
from .base import Algorithm, Reduction, skip


@dataclass(frozen=True)
class Dense(Algorithm):
    """The mean of all gradients by the transport's all-reduce. A residual, if there is one, is sent along.

    Gradients are divided by P before the sum, as in DistributedDataParallel, which gives the same bits.
    """

    name: ClassVar[str] = "dense"

    def reduce(self, comm: SparseCommunicator, acc: Accumulator, k: int, state: Any) -> Reduction:
        values = acc.values
        mean = values.mul_(1.0 / comm.world) if not acc.residuals else values * (1.0 / comm.world)
        if comm.world > 1:
            comm.transport.all_reduce_(mean, "dense")
        if not all_finite(mean):
            return skip(state)
        return Reduction(mean=mean, local_count=acc.size, state=state)
