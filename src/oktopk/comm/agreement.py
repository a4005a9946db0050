"""Ranks check that they are about to do the same thing, before they do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..errors import OkTopkError, WireError
from .base import Communicator
from .messages import parse_json

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
        if not (isinstance(other, dict) and isinstance(other.get("terms"), dict) and "problem" in other):
            raise WireError(f"agreement: rank {comm.global_rank(rank)} sent no terms: {_shorten(repr(other))}")
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
