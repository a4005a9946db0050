"""Ranks check that they are about to do the same thing, before they do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import OkTopkError, WireError
from ..metrics.traffic import Operation
from .base import Communicator
from .messages import parse_json, seal, unseal
from .transport import format_ranks

_LONGEST = 200
_ROOM = 1 << 16


def agree(comm: Communicator, terms: Mapping[str, object], problem: str | None = None) -> None:
    """Compare `terms` on all ranks; raise a ValueError on every rank if one differs.

    A rank with a `problem` of its own passes it, and every rank raises: none is left waiting.
    """
    mine = {name: _shorten(str(value)) for name, value in terms.items()}
    gathered = gather_json(
        comm,
        {"problem": None if problem is None else _shorten(problem, 5 * _LONGEST), "terms": mine},
        "agreement",
    )
    if problem is not None:
        raise ValueError(problem)
    for rank, other in enumerate(gathered):
        if not _well_formed(other):
            raise WireError(
                f"all_gather (agreement): rank {comm.global_rank(rank)} sent something else than terms"
            )
    for rank, other in enumerate(gathered):
        if other["problem"] is not None:
            raise ValueError(f"on rank {comm.global_rank(rank)}: {other['problem']}")
    own = comm.global_rank(comm.rank)
    for rank, other in enumerate(gathered):
        theirs = other["terms"]
        for name in {**mine, **theirs}:
            here, there = mine.get(name), theirs.get(name)
            if here != there:
                who = comm.global_rank(rank)
                raise ValueError(f"ranks disagree on {name}: rank {own} has {here}, rank {who} {there}")


def _well_formed(message: Any) -> bool:
    """Whether a message of another rank has a problem, or none, and terms."""
    return (
        isinstance(message, dict)
        and message.keys() == {"problem", "terms"}
        and isinstance(message["problem"], str | None)
        and isinstance(message["terms"], dict)
    )


@contextmanager
def checking_together(comm: Communicator, owned: bool) -> Iterator[dict[str, object]]:
    """Check arguments on all ranks at once: an error in the block on one of them is an error on every one.

    The block puts into the dictionary what the ranks must agree on. If they do not, a communicator that is `owned`
    is closed.
    """
    terms: dict[str, object] = {}
    try:
        try:
            yield terms
        except Exception as error:
            with suppress(ValueError, OkTopkError):  # it is for the others; here the error itself is raised
                agree(comm, {}, f"{type(error).__name__}: {error}")
            raise
        agree(comm, terms)
    except BaseException:
        if owned:
            comm.close()
        raise


class Digest:
    """A cryptographic hash of what all ranks should have in common: nobody finds two contents with the same one.

    >>> Digest().add(b"the result").value == Digest().add(b"the result").value
    True
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)

    def add(self, data: Tensor | bytes) -> Digest:
        """Take bytes in: those of a contiguous tensor in host memory, or others. Their length belongs to them."""
        content = data if isinstance(data, bytes) else data.view(torch.uint8).numpy().data
        self._hash.update(len(content).to_bytes(8, "little"))
        self._hash.update(content)
        return self

    def copy(self) -> Digest:
        """One that goes on from here by itself."""
        other = Digest()
        other._hash = self._hash.copy()
        return other

    @property
    def value(self) -> bytes:
        return self._hash.digest()


def post_digest(
    comm: Communicator,
    digest: Digest,
    what: str,
    remedy: str = "Nothing is applied; restart from the last checkpoint",
) -> Callable[[], None]:
    """Send a digest of `what` all ranks should have in common to all other ranks.

    Returns a function that receives theirs and raises a WireError if one differs; the caller can work in between.
    Digests go from each rank to each other one: a rank between them could hide that it told them different things.
    """
    number, operation = next(comm.numbers), Operation("all_to_all", "digest", control=True)
    own = torch.frombuffer(bytearray(digest.value), dtype=torch.uint8)
    message = seal(own, comm.global_rank(comm.rank), number, operation)
    messages = [None if rank == comm.rank else message for rank in range(comm.world)]
    arriving = comm.exchange(messages, message.numel(), operation.phase, control=True)

    def compare() -> None:
        others = []
        for rank, theirs in arriving:
            if not torch.equal(unseal(theirs, comm.global_rank(rank), number, operation, torch.uint8), own):
                others.append(comm.global_rank(rank))
        if others:
            who = f"{format_ranks(sorted(others))} and rank {comm.global_rank(comm.rank)}"
            raise WireError(f"{operation}: {who} differ in {what}: a rank told others different things. {remedy}")

    return compare


def _shorten(text: str, longest: int = _LONGEST) -> str:
    """The text; a long one is truncated, with a digest so that different ones stay different."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def gather_json(comm: Communicator, data: Any, phase: str) -> list[Any]:
    """The data of each rank, in rank order: control traffic, for rare occasions."""
    text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
    gathered = comm.all_gather_sealed(text, _ROOM, phase)
    return [
        parse_json(bytes(theirs.numpy()), comm.global_rank(rank), phase) for rank, theirs in enumerate(gathered)
    ]
