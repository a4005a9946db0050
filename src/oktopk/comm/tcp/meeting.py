"""The ranks of a communicator meet over a gloo group, and connect for messages."""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import CommError
from ...utils.secret import REQUIRE_SECRET, SECRET, SECRET_FILE, is_required, read_secret
from ...utils.timeouts import TIMEOUTS
from ..failure_board import FailureBoard
from . import rendezvous
from .handshake import Endpoint, Handshake, derive_key
from .mesh import Mesh

_log = logging.getLogger(__name__)
_UNCHECKED = f"{REQUIRE_SECRET} is 1, but gloo would carry the messages, and checks no secret"


class Meeting:
    """One rank's part of it.

    Args:
        rank: This rank.
        world: How many ranks there are.
        timeout: Seconds that an operation between them may take.
        add_up: Sums a tensor over all ranks, in place.
    """

    def __init__(self, rank: int, world: int, timeout: float, add_up: Callable[[Tensor], None]) -> None:
        self._rank, self._world, self._timeout, self._add_up = rank, world, timeout, add_up

    def meet(
        self, store: Any, name: str, board: FailureBoard, mistake: str | None = None, problem: str | None = None
    ) -> tuple[Mesh | None, CommError | ValueError | None]:
        """Connect to all ranks. All of them call it together, and come to the same result.

        Args:
            store: The job's store.
            name: Of the communicator, the same on all ranks.
            board: Gets the key with which ranks sign their notes.
            mistake: Which argument of this rank is wrong.
            problem: Why this rank must not start.

        Returns:
            The connections, or None if messages stay with gloo; and why the job must not start, or None.
        """
        me, secret, listener = rendezvous.introduce(store, name, self._world)
        me = me.with_faults(mistake, problem)
        with listener or nullcontext():
            everybody = rendezvous.parse_introductions(self._gather(me.to_bytes()))
            if mistake := rendezvous.find_mistake(everybody, self._rank):
                return None, ValueError(mistake)
            if problem := rendezvous.find_problem(everybody):
                return None, CommError(problem)
            key = rendezvous.session_key(secret, everybody)
            board.start_session(key)
            if secret is None and self._rank == 0 and rendezvous.spans_machines(everybody):
                _warn_once(
                    "oktopk: this job runs on several hosts without a secret: whoever reaches their ports may "
                    f"disturb it. Set {SECRET} or {SECRET_FILE} (docs/security.md)"
                )
            mesh, obstacle = None, rendezvous.find_obstacle(everybody)
            speaks = self._rank == 0
            if obstacle is None and listener is not None:
                endpoints = [one.endpoint for one in everybody if one.endpoint is not None]
                mesh, obstacle = self._connect(listener, endpoints, key)
                speaks = bool(obstacle)
        if mesh is None and self._world > 1 and any(one.required for one in everybody):
            return None, CommError(f"{_UNCHECKED}: {obstacle or 'a rank asks for it, or cannot connect'}")
        if obstacle and speaks:
            _log.warning("rank %d: messages fall back to gloo, which is slower: %s", self._rank, obstacle)
        return mesh, None

    def _connect(self, listener: socket.socket, endpoints: list[Endpoint], key: bytes) -> tuple[Mesh | None, str]:
        """Connect, and vote: all ranks have connections, or none. Returns also what went wrong on this rank."""
        mesh, problem = None, ""
        try:
            end = time.monotonic() + min(self._timeout / 3, TIMEOUTS.rendezvous)
            mesh = Mesh(Handshake(self._rank, endpoints, key, end).connect(listener))
        except Exception as error:  # whatever it is, the others wait for the vote of this rank
            problem = str(error) or repr(error)
        votes = torch.tensor([int(mesh is not None)])
        self._add_up(votes)
        if mesh is not None and int(votes) < self._world:
            mesh.close()
            mesh = None
        return mesh, problem

    def _gather(self, text: bytes) -> list[bytes]:
        """The texts of all ranks, in rank order."""
        rows = torch.zeros(self._world, rendezvous.ROOM, dtype=torch.uint8)
        rows[self._rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._add_up(rows)
        return [bytes(row.numpy()).rstrip(b"\0") for row in rows]


def key_before_session(name: str) -> bytes | None:
    """What signs notes until the ranks have met; None without a secret. A wrong one is found at the meeting."""
    try:
        secret = read_secret()
    except ValueError:
        return None
    return None if secret is None else derive_key(secret, b"before the session " + name.encode())


def key_without_session(name: str) -> bytes | None:
    """What signs the notes of ranks that have not met here; None without a secret."""
    try:
        rendezvous.tcp_allowed()
        secret = read_secret()
    except ValueError as error:
        raise CommError(str(error)) from error
    if is_required():
        raise CommError(f"{_UNCHECKED}: use GroupCommunicator.exclusive()")
    return None if secret is None else derive_key(secret, name.encode())


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)
