"""A communicator of some of the ranks of another one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..metrics.traffic import Operation
from .base import Communicator, Wrapped
from .messages import seal, sealed_bytes, unseal
from .transport import Pending


class Subset(Wrapped):
    """The given ranks, this one among them, over the connections of all. A failure still ends all ranks."""

    def __init__(self, inner: Communicator, ranks: Sequence[int], timeout: float | None = None) -> None:
        super().__init__(list(ranks).index(inner.rank), len(ranks), inner.timeout if timeout is None else timeout)
        self.inner, self.ranks = inner, ranks

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        return self.inner.post_send(message, self.ranks[peer], operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return self.inner.post_recv(capacity, self.ranks[peer], operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        """By a ring: parts travel round once to be summed, and once more to be distributed.

        P = 3, rank 0 sends part:   0   2   |   1   0
        and gets from rank 2:       2   1   |   0   2
        """
        operation = Operation("all_reduce", phase, control)
        deadline, whole = self._deadline(), x.cpu().contiguous().view(-1)
        parts = whole.tensor_split(self.world)
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        for step in range(2 * (self.world - 1)):
            outgoing, part = (parts[(self.rank - step - later) % self.world] for later in (0, 1))
            number = next(self.numbers)
            incoming = self.post_recv(sealed_bytes(part.nbytes), source, operation)
            sending = self.post_send(seal(outgoing, self.global_rank(self.rank), number, operation), to, operation)
            arrived = unseal(incoming.wait(deadline), self.global_rank(source), number, operation, part.dtype)
            if step < self.world - 1:
                part += arrived
            else:
                part.copy_(arrived)
            sending.wait(deadline)
        if whole.data_ptr() != x.data_ptr():
            x.copy_(whole.view(x.shape))

    def global_rank(self, rank: int) -> int:
        return self.inner.global_rank(self.ranks[rank])
