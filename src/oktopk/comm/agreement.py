"""Ranks make sure that they are about to do the same thing, before they do it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from ..errors import WireError
from .base import Communicator, pack, packed_bytes, unpack

_ROOM = 4096


def agree(comm: Communicator, terms: Mapping[str, object], problem: str | None = None) -> None:
    """Compare `terms` on all ranks; raise the same kind of ValueError everywhere if one differs.

    A rank that has found a `problem` of its own says so, and every rank raises: nobody is left waiting.
    """
    mine = {name: str(value)[:200] for name, value in terms.items()}
    text = json.dumps({"problem": problem, "terms": mine}).encode()
    message = pack(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    gathered = comm.all_gather(message, packed_bytes(_ROOM), "agreement", control=True)
    if problem is not None:
        raise ValueError(problem)
    others = []
    for rank, received in enumerate(gathered):
        try:
            others.append(json.loads(bytes(unpack(received, torch.uint8).numpy())))
        except ValueError as error:
            raise WireError(f"agreement: rank {rank} sent something unreadable") from error
    for rank, other in enumerate(others):
        if other["problem"] is not None:
            raise ValueError(f"on rank {rank}: {other['problem']}")
    for rank, other in enumerate(others):
        for name, value in mine.items():
            if other["terms"].get(name) != value:
                theirs = other["terms"].get(name)
                raise ValueError(f"ranks disagree on {name}: rank {comm.rank} has {value}, rank {rank} {theirs}")
