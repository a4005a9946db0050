"""A communicator whose sums are under way until somebody waits for them."""

from __future__ import annotations

from torch import Tensor

import oktopk
from oktopk.comm import PendingSum
from oktopk.comm.base import Wrapped
from oktopk.comm.transport import Pending
from oktopk.metrics.traffic import Operation


class _Sum:
    def __init__(self, comm: LateSums, x: Tensor, phase: str, control: bool) -> None:
        self.comm, self.x, self.phase, self.control = comm, x, phase, control

    def wait(self) -> None:
        assert self.comm.begun.pop(0) is self.x, "sums are waited for in the order in which they were begun"
        if self.comm.broken:
            raise oktopk.CommError("nobody there")
        self.comm.inner.all_reduce_(self.x, self.phase, control=self.control)


class LateSums(Wrapped):
    """begin_all_reduce() touches nothing; wait() makes the sum, or fails if the communicator is `broken`."""

    def __init__(self, inner: oktopk.Communicator) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers = inner, inner.numbers
        self.begun: list[Tensor] = []
        """What is to be summed, of the sums that are under way."""
        self.broken = False

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        return self.inner.post_send(message, peer, operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return self.inner.post_recv(capacity, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        self.inner.all_reduce_(x, phase, control=control)

    def begin_all_reduce(self, x: Tensor, phase: str, *, control: bool = False) -> PendingSum:
        self.begun.append(x)
        return _Sum(self, x, phase, control)
