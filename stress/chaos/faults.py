"""Faults, and a communicator that lets one of them happen at a chosen moment of one rank.

A *moment* is a message that the rank sends, or a sum over all ranks that it takes part in: its step, its phase,
the peer, and which of those it is. The same run without a fault tells which moments there are (`Faulty.moments`).
The inside of a library's all_reduce is out of reach: faults of messages happen to the project's own.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk import Communicator
from oktopk.comm import Operation, Pending
from oktopk.comm.base import Wrapped
from oktopk.comm.transport import PendingSum

MESSAGE_FAULTS = ("delay", "drop", "cut", "duplicate", "corrupt")
RANK_FAULTS = ("slow", "pause", "raise", "die")
SLEEPS = ("delay", "slow", "pause")
EVERYBODY = -1


class Moment(NamedTuple):
    """`peer` is EVERYBODY in a sum over all ranks; `number` counts those that are the same otherwise."""

    step: int
    phase: str
    peer: int
    number: int


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when; `seconds` is how long it lasts, if it does, `seed` says which bits."""

    kind: str
    rank: int
    moment: Moment
    seconds: float = 0.0
    seed: int = 0


class Burned(RuntimeError):
    """What a rank raises that fails by itself."""


class Death(BaseException):
    """Ends a rank without a word to the others."""


def burn(fault: Fault, size: int) -> None:
    raise Burned("disk on fire")


def die(fault: Fault, size: int) -> None:
    raise Death


Acts = Mapping[str, Callable[[Fault, int], None]]
ON_THREADS: Acts = {"raise": burn, "die": die}
"""What a rank does at its moment, which is a message or a sum of so many bytes; on processes it can do more."""


class _Gone:
    """A send that nobody will receive; the sender cannot tell."""

    def __init__(self, message: Tensor) -> None:
        self.message = message

    def wait(self, deadline: float) -> Tensor:
        return self.message


class Faulty(Wrapped):
    """Wraps any communicator. Who steps tells it the number of the step."""

    def __init__(self, inner: Communicator, fault: Fault | None = None, acts: Acts = ON_THREADS) -> None:
        super().__init__(inner.rank, inner.world, inner.timeout)
        self.inner, self.numbers = inner, inner.numbers
        self.fault = fault if fault is not None and fault.rank == inner.rank else None
        self.acts = acts
        self.step = 0
        self.moments: list[Moment] = []
        self._seen: Counter[tuple[int, str, int]] = Counter()
        self.struck: float | None = None
        """When the fault has happened, by time.monotonic()."""
        self._dead = False
        self._sent_twice: list[Pending] = []  # under way for as long as nobody asks for it

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        kind = self._arrive(operation.phase, peer, message.nbytes)
        if kind == "drop":
            return _Gone(message)
        if kind == "duplicate":
            self._sent_twice.append(self.inner.post_send(message.clone(), peer, operation))
        if kind in ("cut", "corrupt") and self.fault is not None:
            message = damaged(message, kind, self.fault.seed)
        return self.inner.post_send(message, peer, operation)

    def post_recv(self, capacity: int, peer: int, operation: Operation) -> Pending:
        return self.inner.post_recv(capacity, peer, operation)

    def all_reduce_(self, x: Tensor, phase: str, *, control: bool = False) -> None:
        self._arrive(phase, EVERYBODY, x.nbytes)
        self.inner.all_reduce_(x, phase, control=control)

    def begin_all_reduce(self, x: Tensor, phase: str, *, control: bool = False) -> PendingSum:
        self._arrive(phase, EVERYBODY, x.nbytes)
        return self.inner.begin_all_reduce(x, phase, control=control)

    def fail(self, error: BaseException) -> None:
        if not self._dead:
            self.inner.fail(error)

    def _arrive(self, phase: str, peer: int, size: int) -> str | None:
        """Note the moment; what concerns the whole rank happens here, the rest is the message's fault."""
        key = self.step, phase, peer
        moment = Moment(*key, self._seen[key])
        self._seen[key] += 1
        self.moments.append(moment)
        fault = self.fault
        if fault is None or (moment != fault.moment and not (self.struck and fault.kind == "slow")):
            return None
        self.struck, self._dead = self.struck or time.monotonic(), fault.kind == "die"
        if fault.kind in SLEEPS:
            time.sleep(fault.seconds)
        elif fault.kind in self.acts:
            self.acts[fault.kind](fault, size)
        return fault.kind


def damaged(message: Tensor, kind: str, seed: int) -> Tensor:
    """Cut somewhere, or with one bit, one byte or some bytes changed."""
    chance = random.Random(seed)
    size = message.numel()
    if kind == "cut":
        return message[: chance.randrange(1, size)].clone()
    spoilt = message.clone()
    first = chance.randrange(size)
    places: Sequence[int] = range(first, min(size, first + chance.choice((1, 1, 1, 2, 8, 40))))
    masks = [1 << chance.randrange(8)] if len(places) == 1 else [chance.randrange(1, 256) for _ in places]
    spoilt[list(places)] ^= torch.tensor(masks, dtype=torch.uint8)
    return spoilt
