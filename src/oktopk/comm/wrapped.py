"""What decorators of a communicator share."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..metrics.traffic import Operation
from .base import Communicator


class Wrapped(Communicator):
    """A communicator over another one, `inner`: what concerns no single message goes there as it is."""

    inner: Communicator

    def known_as(self, rank: int) -> int:
        return self.inner.known_as(rank)

    def measure(self, operation: Operation) -> AbstractContextManager[None]:
        return self.inner.measure(operation)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()
