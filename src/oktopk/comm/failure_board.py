"""What ranks that have lost each other leave in the job's store, so that each can tell who is really lost.

    rank 1 ── waits for ──► rank 0 ── waits for ──► rank 2, which is dead

Rank 0 loses its connection to rank 2, notes that, and hangs up. Rank 1 loses its connection to rank 0 then, finds
the note, and names rank 2. In a sum over all ranks nobody knows whom it has lost, but everybody leaves a note that
it is there: lost is who leaves none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_log = logging.getLogger(__name__)

_PATIENCE, _NO_PATIENCE = 3.0, 0.5
"""Seconds to wait for the store, whose own host may be the one that died; and once it has not answered."""
_HEARKEN, _PAUSE = 2.0, 0.05
"""Seconds to wait for the notes of others, who may be about to leave them; and between two looks."""
_SOMEBODY = "?"


class Loss(NamedTuple):
    """What is known when a rank has lost a peer, or does not know whom."""

    reason: str | None
    """Of the first rank that has given up and told why."""
    ranks: list[int]
    """Who is lost, as far as others have left notes."""


class FailureBoard:
    """The notes of one communicator, as one of its ranks leaves and reads them."""

    def __init__(self, name: str, rank: int, world: int) -> None:
        # A clone has a connection of its own: its timeout is not that of everybody, and no lock is shared.
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        self._rank, self._world = rank, world
        self._reason, self._trouble = (f"oktopk/{name}/{what}" for what in ("failed", "trouble"))
        self._turn = threading.Lock()
        self._silent = False
        self._leaving = threading.Event()

    def silence(self) -> None:
        """Nobody is told or asked anything any more; who is waiting for an answer goes without."""
        self._leaving.set()

    def post(self, reason: str) -> None:
        """The first reason is the one that counts. If nobody can read it, others only see a lost connection."""

        def leave(store: Any) -> None:
            store.compare_set(self._reason, "", reason)
            store.set(self._trouble, _SOMEBODY)

        self._ask(leave, _PATIENCE)

    def trouble(self) -> bool:
        """Whether a rank has given up, or is about to."""
        return bool(self._ask(lambda store: store.check([self._trouble]), _PATIENCE))

    def lose(self, peer: int | None) -> Loss:
        """Note that this rank has lost a peer, or (None) somebody; what the others have to say about it."""

        def note(store: Any) -> bool:
            store.set(self._note(self._rank), _SOMEBODY if peer is None else str(peer))
            store.set(self._trouble, _SOMEBODY)
            return True

        found = None
        if self._ask(note, _PATIENCE):
            found = self._ask(lambda store: self._hearken(store, peer), _HEARKEN + _PATIENCE)
        return found or Loss(None, [] if peer is None else [peer])

    def _hearken(self, store: Any, peer: int | None) -> Loss:
        end = time.monotonic() + _HEARKEN
        everybody = [self._note(rank) for rank in range(self._world)]
        # No wait of the store's own: that of a file takes a second more than it was told.
        while not (store.check([self._reason]) or store.check(everybody)) and time.monotonic() < end:
            if self._leaving.wait(_PAUSE):
                break
        reason = store.get(self._reason).decode() if store.check([self._reason]) else None
        return Loss(reason, self._lost(store, peer))

    def _lost(self, store: Any, peer: int | None) -> list[int]:
        """A peer that has lost somebody itself is alive, and has only hung up: then it is that one, and so on."""
        found, seen = peer, {self._rank}
        while found is not None and found not in seen:
            seen.add(found)
            if not store.check([self._note(found)]):
                return [found]
            said = store.get(self._note(found)).decode()
            found = None if said == _SOMEBODY else int(said)
        nobody = [] if peer is None else [peer]
        if found is not None:  # they wait for each other
            return nobody
        return [rank for rank in range(self._world) if not store.check([self._note(rank)])] or nobody

    def _note(self, rank: int) -> str:
        return f"{self._reason}/{rank}"

    def _ask(self, question: Callable[[Any], T], patience: float) -> T | None:
        """The store's answer, or None if it has none in time.

        Behind a link that is down it never has, whatever timeout was set: a thread of its own waits for it, and
        is left alone. Questions wait for their turn; none is dropped.
        """
        if self._leaving.is_set():
            return None
        answers: list[T] = []
        store, turn = self._store, self._turn

        def ask() -> None:
            try:
                with turn:
                    answers.append(question(store))
            except RuntimeError as error:
                _log.debug("the store with notices of failures does not answer: %s", error)

        asking = threading.Thread(target=ask, name="oktopk notices", daemon=True)
        asking.start()
        end = time.monotonic() + (_NO_PATIENCE if self._silent else patience)
        while asking.is_alive() and time.monotonic() < end and not self._leaving.is_set():
            asking.join(_PAUSE)
        self._silent = asking.is_alive()
        return answers[0] if answers else None
