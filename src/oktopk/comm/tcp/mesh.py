r"""TCP connections of one rank to all others, for messages.

    rank 0 ──── rank 1        whoever waits for a message sends and receives itself, whatever is under way,
       │ \    /   │           instead of waking a thread of the library for each message, and being woken by it
    rank 2 ──── rank 3

A message begins with its own length, so that nothing else is needed to tell messages apart, and a receive takes as
much memory as its message.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import WireError
from ..base import LENGTH, ROOM

_LONGEST_POLL = 2**31 - 1
"""Milliseconds."""


class Broken(RuntimeError):
    """A connection has failed, or nothing has come in time: the same as torch raises for its own."""


class Closed(Broken):
    """It was closed here."""


class Moving(ABC):
    """A message that is sent or received; waits like a Work of torch."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.done = False
        self.error: Broken | None = None

    def wait(self, timeout: timedelta) -> None:
        self._mesh.wait(self, time.monotonic() + timeout.total_seconds())

    @abstractmethod
    def move(self, link: socket.socket) -> bool:
        """As much of it as the connection takes or gives at once; whether that was the rest."""


class _Sending(Moving):
    def __init__(self, mesh: Mesh, message: Tensor) -> None:
        super().__init__(mesh)
        self._rest = message.numpy().data

    def move(self, link: socket.socket) -> bool:
        self._rest = self._rest[link.send(self._rest) :]
        return not self._rest


class Receiving(Moving):
    """At first, its length is all that is known of a message."""

    def __init__(self, mesh: Mesh, capacity: int) -> None:
        super().__init__(mesh)
        self._capacity = capacity
        self._length = bytearray(LENGTH.size)
        self._message: Any = None
        self._rest = memoryview(self._length)

    def move(self, link: socket.socket) -> bool:
        got = link.recv_into(self._rest)
        if not got:
            raise ConnectionError("it has hung up")
        self._rest = self._rest[got:]
        if not self._rest and self._message is None and LENGTH.size <= self._says <= max(self._capacity, ROOM):
            self._message = np.empty(self._says, np.uint8)
            self._message[: LENGTH.size] = self._length
            self._rest = self._message.data[LENGTH.size :]
        return not self._rest

    @property
    def _says(self) -> int:
        return int(LENGTH.unpack(self._length)[0])

    def message(self, whose: str) -> Tensor:
        """What has come in."""
        if not LENGTH.size <= self._says <= self._capacity:
            raise WireError(f"{whose} says {self._says} of {self._capacity} bytes")
        return torch.from_numpy(self._message)


class Mesh:
    """What one rank has under way with the others. Messages between two ranks come in the order they were posted.

    One thread uses it at a time; another one may close it, which wakes the first.
    """

    def __init__(self, links: Mapping[int, socket.socket]) -> None:
        self._links = dict(links)
        self._outgoing: dict[int, deque[Moving]] = {peer: deque() for peer in links}
        self._incoming: dict[int, deque[Moving]] = {peer: deque() for peer in links}
        self._peers = {link.fileno(): peer for peer, link in links.items()}
        self._watched = dict.fromkeys(links, 0)
        self._poll = select.poll()
        self._turn = threading.RLock()  # a signal may close it in the very thread that waits
        self._closed = False
        self._process = os.getpid()
        for link in links.values():
            link.setblocking(False)
        self._forgotten = weakref.finalize(self, _close_all, list(links.values()))
        self._forgotten.atexit = False  # a thread may still be waiting then, and the system closes them anyway

    def send(self, message: Tensor, peer: int) -> Moving:
        """Begin to send; what the connection takes at once is gone with this call."""
        sending = _Sending(self, message)
        with self._turn:
            self._queue(self._outgoing, peer).append(sending)
            self._advance(peer, self._outgoing[peer])
            self._watch(peer)
        return sending

    def receive(self, capacity: int, peer: int) -> Receiving:
        receiving = Receiving(self, capacity)
        with self._turn:
            self._queue(self._incoming, peer).append(receiving)
            self._watch(peer)
        return receiving

    def _queue(self, queues: Mapping[int, deque[Moving]], peer: int) -> deque[Moving]:
        if self._closed:
            raise Closed
        if peer not in queues:
            raise ValueError("there is no connection to it")
        return queues[peer]

    def wait(self, moving: Moving, deadline: float) -> None:
        """Until a message has come or gone; what else is under way moves meanwhile."""
        with self._turn:
            while not (moving.done or self._closed):
                left = deadline - time.monotonic()
                ready = self._poll.poll(min(1e3 * left, _LONGEST_POLL)) if left > 0 else []
                if self._closed:
                    break
                if not ready and time.monotonic() >= deadline:
                    raise Broken("nothing has come in time")
                for place, events in ready:
                    peer = self._peers[place]
                    if events & ~select.POLLOUT:  # if it has hung up, too
                        self._advance(peer, self._incoming[peer])
                    if events & ~select.POLLIN:
                        self._advance(peer, self._outgoing[peer])
                    self._watch(peer)
        if not moving.done:
            raise Closed
        if moving.error is not None:
            raise moving.error

    def _advance(self, peer: int, queue: deque[Moving]) -> None:
        try:
            while queue:
                if queue[0].move(self._links[peer]):
                    queue.popleft().done = True
        except BlockingIOError:
            return
        except OSError as error:  # nothing more comes through there, in either direction
            reason = Closed() if self._closed else Broken(str(error))
            for waiting in (self._incoming[peer], self._outgoing[peer]):
                for moving in waiting:
                    moving.done, moving.error = True, reason
                waiting.clear()

    def _watch(self, peer: int) -> None:
        """Let poll() tell of a peer just what is waited for."""
        wanted = (select.POLLIN if self._incoming[peer] else 0) | (select.POLLOUT if self._outgoing[peer] else 0)
        if wanted == self._watched[peer]:
            return
        if wanted:
            self._poll.register(self._links[peer], wanted)
        else:
            self._poll.unregister(self._links[peer])
        self._watched[peer] = wanted

    def close(self) -> None:
        """Hang up, and wake whoever waits. Twice is fine.

        A forked process has the same connections: it lets go of them, and its parent keeps them.
        """
        self._closed = True
        if os.getpid() != self._process:
            self._forgotten()
            return
        for link in self._links.values():
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster, or it is closed already
                continue
        with self._turn:
            self._forgotten()


def _close_all(links: Iterable[socket.socket]) -> None:
    for link in links:
        link.close()
