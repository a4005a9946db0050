"""What a transport provides: messages between two ranks, sums over all of them, and an end.

It implements three primitives: post_send, post_recv and all_reduce_. A transport that can sum in the background
also implements begin_all_reduce.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..metrics.traffic import Operation
from ..utils.timeouts import TIMEOUTS

CLOSED = "the communicator is closed"
INTERRUPTED = "interrupted: the communicator was closed in the meantime"
_MOST_NAMED = 4


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self, deadline: float) -> Tensor:
        """Block until done or until time.monotonic() passes the deadline; a receive returns its message."""
        ...


class PendingSum(Protocol):
    """A sum under way, which the communicator's timeout bounds."""

    def wait(self) -> None:
        """Block until the sum is in the tensor that it was begun with."""
        ...


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks by name; of many, the first few."""
    names = [f"rank {rank}" for rank in ranks[:_MOST_NAMED]]
    if len(ranks) > _MOST_NAMED:
        names.append(f"{len(ranks) - _MOST_NAMED} others")
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


class Transport(ABC):
    """One rank's connection to the others.

    Args:
        rank: This rank.
        world: How many ranks there are.
        timeout: Seconds that an operation may take.
    """

    def __init__(self, rank: int, world: int, timeout: float = TIMEOUTS.operation) -> None:
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.numbers = itertools.count()
        """Of sealed operations. A communicator that wraps another one shares its numbers."""

    @abstractmethod
    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        """Begin to send a message; those between two ranks arrive in the order in which they were posted.

        Args:
            message: A message as `pack` makes it. It must not change until it is waited for.
            peer: The rank that receives it.
            operation: What it belongs to.
        """

    @abstractmethod
    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        """Begin to receive a message.

        Args:
            capacity: The bytes that it may have at most.
            peer: The rank that sends it.
            operation: What it belongs to.
        """

    @abstractmethod
    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        """Sum over all ranks, in place; the same bits on every rank.

        Args:
            x: The summand, of one shape and type on all ranks; becomes the sum.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.
        """

    def begin_all_reduce(self, x: Tensor, phase: str, *, control: bool = False) -> PendingSum:
        """Begin to sum over all ranks, in place. All ranks begin their sums in the same order.

        A transport that cannot sum in the background has done it when this returns.

        Args:
            x: The summand, of one shape and type on all ranks; becomes the sum once that is waited for. It must
                not be touched until then.
            phase: Names the traffic, for the meter and in errors.
            control: Whether it is control traffic, which is counted apart.

        Returns:
            The pending sum. Wait for sums in the order in which they were begun.
        """
        self.all_reduce_(x, phase, control=control)
        return _Done()

    def fail(self, error: BaseException) -> None:  # noqa: B027 - a transport without a back channel times out
        """Tell the other ranks that this one failed with `error`. It must not be used afterwards."""

    def interrupt(self) -> None:  # noqa: B027 - where waits cannot be woken, they end with their timeout
        """Wake another thread that waits for ranks here, by an error. It must not be used afterwards."""

    def close(self) -> None:  # noqa: B027 - most transports have nothing to release
        """Release what the communicator holds. It must not be used afterwards."""
