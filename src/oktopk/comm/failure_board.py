"""Notes that ranks leave in the job's store when they lose each other, so that each can tell which one died.

    rank 1 ── waits for ──► rank 0 ── waits for ──► rank 2, which is dead

Rank 0 loses its connection to rank 2, leaves a note, and closes its connections. Rank 1 then loses its connection
to rank 0, finds the note, and names rank 2. In a sum over all ranks no rank knows which one it lost, but every
rank leaves a note that it is alive: those without a note are lost.

Others may write to the store too. Ranks sign their notes with a key that is not in the store; a note without a
valid signature counts as none. Until the ranks have met there may be no such key: then nobody looks whether others
have failed, and notes are read only by a rank that has lost its connections already.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..utils.timeouts import TIMEOUTS

T = TypeVar("T")
_log = logging.getLogger(__name__)
_UNKNOWN = "?"


class Loss(NamedTuple):
    """What is known when a rank has lost a peer, or does not know which one."""

    reason: str | None
    """The error of the first rank that failed, if it posted one."""
    ranks: list[int]
    """The ranks that are lost, as far as the notes of others tell."""
    isolated: bool = False
    """Whether the store did not answer either."""


class FailureBoard:
    """The notes of one communicator, as one of its ranks leaves and reads them.

    Args:
        name: Of the communicator, the same on all ranks.
        rank: This rank.
        world: How many ranks there are.
        key: Signs the notes; without one they are not signed.
        met: Whether the key is the one to stay; otherwise start_session() follows.
    """

    def __init__(self, name: str, rank: int, world: int, key: bytes | None = None, met: bool = True) -> None:
        # A clone has its own connection: its timeout is not shared with others, and neither is a lock.
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        self._store.set_timeout(timedelta(seconds=TIMEOUTS.store))
        self._rank, self._world = rank, world
        self._key, self._met = key, met
        self._reason, self._failures = (f"oktopk/{name}/{what}" for what in ("failed", "trouble"))
        self._turn = threading.Lock()
        self._store_silent = False
        self._silenced = threading.Event()

    def start_session(self, key: bytes) -> None:
        """The ranks have met: from now on notes are signed with the key that only they have."""
        self._key, self._met = key, True

    def silence(self) -> None:
        """From now on the store is neither read nor written; a thread that waits for its answer returns."""
        self._silenced.set()

    def post_failure(self, reason: str) -> None:
        """Post why this rank failed; the first reason counts. Without a store, others see a lost connection."""

        def write(store: Any) -> None:
            signed = self._sign(self._reason, reason)
            store.compare_set(self._reason, "", signed)
            if self._read(store, self._reason) is None:  # a stranger was here
                store.set(self._reason, signed)
            store.set(self._failures, self._sign(self._failures, _UNKNOWN))

        self._query(write, TIMEOUTS.store)

    def has_failures(self) -> bool:
        """Whether a rank has failed, or has lost another one; not known while an earlier query still waits.

        Nor is it before the ranks have met: whoever reaches the store could end the job. A rank that fails then
        closes its connections, which the others notice.
        """
        if not self._met:
            return False
        if self._store_silent and self._turn.locked():
            return False
        return self._query(lambda store: self._read(store, self._failures), TIMEOUTS.store) is not None

    def report_loss(self, peer: int | None) -> Loss:
        """Leave a note that this rank has lost a peer, or (None) some rank; collect the notes of the others."""

        def write(store: Any) -> bool:
            note = self._note_key(self._rank)
            store.set(note, self._sign(note, _UNKNOWN if peer is None else str(peer)))
            store.set(self._failures, self._sign(self._failures, _UNKNOWN))
            return True

        known = [] if peer is None else [peer]
        if not self._query(write, TIMEOUTS.store):
            return Loss(None, known, isolated=True)
        loss = self._query(lambda store: self._collect(store, peer), TIMEOUTS.failure_notes + TIMEOUTS.poll)
        return loss or Loss(None, known)

    def _collect(self, store: Any, peer: int | None) -> Loss:
        """Wait for a reason, or for notes of all ranks."""
        end = time.monotonic() + TIMEOUTS.failure_notes
        notes = [self._note_key(rank) for rank in range(self._world)]
        # Not by store.wait(): that of a FileStore takes up to a second longer than its timeout.
        while True:
            reason = self._read(store, self._reason)
            complete = reason is not None or (store.check(notes) and not self._without_note(store))
            if complete or time.monotonic() >= end or self._silenced.wait(TIMEOUTS.pause):
                return Loss(reason, self._find_lost(store, peer))

    def _find_lost(self, store: Any, peer: int | None) -> list[int]:
        """A peer with a note of its own is alive and lost another rank: follow the notes to one without."""
        found, seen = peer, {self._rank}
        while found is not None and found not in seen:
            seen.add(found)
            note = self._read(store, self._note_key(found))
            if note is None:
                return [found]
            found = int(note) if note.isdecimal() and int(note) < self._world else None
        fallback = self._not_in_sum(store) if peer is None else [peer]
        if found is not None:  # they wait for each other
            return fallback
        return self._without_note(store) or fallback

    def _without_note(self, store: Any) -> list[int]:
        return [rank for rank in range(self._world) if self._read(store, self._note_key(rank)) is None]

    def _sign(self, key: str, text: str) -> str:
        return f"{self._signature(key, text)} {text}"

    def _signature(self, key: str, text: str) -> str:
        return "-" if self._key is None else hmac.digest(self._key, f"{key}\n{text}".encode(), "sha256").hex()

    def _read(self, store: Any, key: str) -> str | None:
        """A note that a rank of this job has left; None if there is none."""
        return self._verify(key, store.get(key)) if store.check([key]) else None

    def _verify(self, key: str, value: bytes) -> str | None:
        signature, _, text = value.decode(errors="replace").partition(" ")
        return text if hmac.compare_digest(signature.encode(), self._signature(key, text).encode()) else None

    def _not_in_sum(self, store: Any) -> list[int]:
        """Ranks that are alive, but have waited for a message, and so did not come to the sum of the others."""
        others = (rank for rank in range(self._world) if rank != self._rank)
        notes = {rank: self._read(store, self._note_key(rank)) for rank in others}
        return [rank for rank, note in notes.items() if note not in (None, _UNKNOWN)]

    def _note_key(self, rank: int) -> str:
        return f"{self._reason}/{rank}"

    def _query(self, query: Callable[[Any], T], timeout: float) -> T | None:
        """The store's answer, or None if there is none in time.

        Behind a link that is down there never is one, whatever timeout the store has: a separate thread waits for
        it, and is left alone. Queries wait for their turn; none is dropped.
        """
        if self._silenced.is_set():
            return None
        answers: list[T] = []
        store, turn = self._store, self._turn

        def ask() -> None:
            try:
                with turn:
                    answers.append(query(store))
            except RuntimeError as error:
                _log.debug("the store with failure notes does not answer: %s", error)

        asking = threading.Thread(target=ask, name="oktopk failure board", daemon=True)
        asking.start()
        end = time.monotonic() + (TIMEOUTS.silent_store if self._store_silent else timeout)
        while asking.is_alive() and time.monotonic() < end and not self._silenced.is_set():
            asking.join(TIMEOUTS.pause)
        self._store_silent = asking.is_alive()
        return answers[0] if answers else None
