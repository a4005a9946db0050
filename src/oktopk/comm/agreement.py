"""Ranks make sure that they are about to do the same thing, before they do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import WireError
from .base import Communicator

_LONGEST = 200
_ROOM = 1 << 16


def agree(comm: Communicator, terms: Mapping[str, object], problem: str | None = None) -> None:
    """Compare `terms` on all ranks; raise a ValueError everywhere if one differs.

    A rank that has found a `problem` of its own says so, and every rank raises: nobody is left waiting.
    """
    mine = {name: _shortened(str(value)) for name, value in terms.items()}
    gathered = gather_json(
        comm,
        {"problem": None if problem is None else _shortened(problem, 5 * _LONGEST), "terms": mine},
        "agreement",
    )
    if problem is not None:
        raise ValueError(problem)
    others = {comm.known_as(rank): _read(comm.known_as(rank), said) for rank, said in enumerate(gathered)}
    for rank, (theirs, _) in others.items():
        if theirs is not None:
            raise ValueError(f"on rank {rank}: {theirs}")
    own = comm.known_as(comm.rank)
    for rank, (_, other) in others.items():
        for name in {**mine, **other}:
            if mine.get(name) != other.get(name):
                here, there = mine.get(name), other.get(name)
                raise ValueError(f"ranks disagree on {name}: rank {own} has {here}, rank {rank} {there}")


def _shortened(text: str, longest: int = _LONGEST) -> str:
    """The text; a long one is cut, with a digest so that different ones stay different."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _read(rank: int, said: Any) -> tuple[str | None, dict[str, str]]:
    try:
        return said["problem"], dict(said["terms"])
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"agreement: rank {rank} sent something unreadable") from error


def gather_json(comm: Communicator, said: Any, phase: str) -> list[Any]:
    """What each rank has to say, in rank order: control traffic, for rare occasions."""
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    heard = []
    for rank, received in enumerate(comm.all_gather_sealed(text, _ROOM, phase)):
        try:
            heard.append(json.loads(bytes(received.numpy())))
        except ValueError as error:
            who = comm.known_as(rank)
            raise WireError(f"{phase}: rank {who} sent something unreadable") from error
    return heard
