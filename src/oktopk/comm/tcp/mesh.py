r"""Dedicated TCP connections of one rank to all others, for messages.

    rank 0 ──── rank 1        a thread that waits for a message moves all that is under way itself, instead of
       │ \    /   │           waking a thread of the library for each message, and being woken by it
    rank 2 ──── rank 3

A message begins with its own length, so nothing else is needed to tell messages apart, and a receive allocates no
more than its message.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...metrics.traffic import Operation
from ...utils.timeouts import TIMEOUTS
from ..messages import LENGTH, MIN_RECEIVE, Closed, LostRank, Messages, Transfer, TransferError, check_length
from .forks import close_in_children
from .keepalive import is_silent

_ENDED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""The connection has failed, or its other side has closed it."""


class _MeshTransfer(Transfer):
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.done = False
        self.error: TransferError | None = None

    def wait(self, timeout: timedelta) -> None:
        self._mesh.wait(self, time.monotonic() + timeout.total_seconds())

    @abstractmethod
    def advance(self, link: socket.socket) -> bool:
        """Move as much of it as the connection allows without blocking; True if that was the rest."""


class _Send(_MeshTransfer):
    def __init__(self, mesh: Mesh, message: Tensor) -> None:
        super().__init__(mesh)
        self._message, self._rest = message, message.numpy().data

    def advance(self, link: socket.socket) -> bool:
        self._rest = self._rest[link.send(self._rest) :]
        return not self._rest

    def message(self, peer: int, operation: Operation) -> Tensor:
        return self._message


class _Receive(_MeshTransfer):
    """Only the length of a message is known at first."""

    def __init__(self, mesh: Mesh, capacity: int) -> None:
        super().__init__(mesh)
        self._capacity = capacity
        self._header = bytearray(LENGTH.size)
        self._message: Any = None
        self._rest = memoryview(self._header)

    def advance(self, link: socket.socket) -> bool:
        received = link.recv_into(self._rest)
        if not received:
            raise ConnectionError("connection closed by peer")
        self._rest = self._rest[received:]
        if not self._rest and self._message is None:
            length = self._length
            if LENGTH.size <= length <= max(self._capacity, MIN_RECEIVE):
                self._message = np.empty(length, np.uint8)
                self._message[: LENGTH.size] = self._header
                self._rest = self._message.data[LENGTH.size :]
        return not self._rest

    @property
    def _length(self) -> int:
        return int(LENGTH.unpack(self._header)[0])

    def message(self, peer: int, operation: Operation) -> Tensor:
        check_length(self._length, self._capacity, peer, operation)
        return torch.from_numpy(self._message)


class Mesh(Messages):
    """Messages over one TCP connection to each other rank.

    One thread uses it at a time; another one may close it, which wakes the first.
    """

    def __init__(self, links: Mapping[int, socket.socket]) -> None:
        self._links = dict(links)
        self._outgoing: dict[int, deque[_MeshTransfer]] = {peer: deque() for peer in links}
        self._incoming: dict[int, deque[_MeshTransfer]] = {peer: deque() for peer in links}
        self._peers = {link.fileno(): peer for peer, link in links.items()}
        self._watched = dict.fromkeys(links, 0)
        self._poll = select.poll()
        self._turn = threading.RLock()  # a signal may close it in the very thread that waits
        self._closed = False
        self._process = os.getpid()
        for link in links.values():
            link.setblocking(False)
        self._release = weakref.finalize(self, _close_all, list(links.values()))
        self._release.atexit = False  # a thread may still be waiting then, and the system closes them anyway
        close_in_children(self)

    def send(self, message: Tensor, peer: int) -> _Send:
        """Begin to send; what the connection accepts at once is gone with this call."""
        sending = _Send(self, message)
        with self._turn:
            self._queue(self._outgoing, peer).append(sending)
            self._advance(peer, self._outgoing[peer])
            self._watch(peer)
        return sending

    def receive(self, capacity: int, peer: int) -> _Receive:
        receiving = _Receive(self, capacity)
        with self._turn:
            self._queue(self._incoming, peer).append(receiving)
            self._watch(peer)
        return receiving

    def _queue(self, queues: Mapping[int, deque[_MeshTransfer]], peer: int) -> deque[_MeshTransfer]:
        if self._closed:
            raise Closed
        if peer not in queues:
            raise ValueError("no connection to this rank")
        return queues[peer]

    def wait(self, transfer: _MeshTransfer, deadline: float) -> None:
        """Until a transfer is done; the others advance meanwhile."""
        with self._turn:
            while not (transfer.done or self._closed):
                left = deadline - time.monotonic()
                ready = self._poll.poll(1e3 * min(left, TIMEOUTS.poll)) if left > 0 else []
                if self._closed:
                    break
                if not ready:
                    if time.monotonic() >= deadline:
                        raise TransferError("timed out")
                    self._drop_silent()
                for descriptor, events in ready:
                    peer = self._peers[descriptor]
                    if events & ~select.POLLOUT:  # also if the peer has closed the connection
                        self._advance(peer, self._incoming[peer])
                    if events & ~select.POLLIN:
                        self._advance(peer, self._outgoing[peer])
                    self._watch(peer)
        if not transfer.done:
            raise Closed
        if transfer.error is not None:
            raise transfer.error

    def _advance(self, peer: int, queue: deque[_MeshTransfer]) -> None:
        try:
            while queue:
                if queue[0].advance(self._links[peer]):
                    queue.popleft().done = True
        except BlockingIOError:
            return
        except TimeoutError:  # the kernel got no answer
            self._drop(peer, TransferError(_silence()))
        except OSError as error:
            self._drop(peer, Closed() if self._closed else TransferError(str(error)))

    def _drop(self, peer: int, reason: TransferError) -> None:
        """Nothing more gets through, in either direction."""
        for waiting in (self._incoming[peer], self._outgoing[peer]):
            for transfer in waiting:
                transfer.done, transfer.error = True, reason
            waiting.clear()

    def _drop_silent(self) -> None:
        """Give up connections whose other host shows no sign of life."""
        for peer, link in self._links.items():
            if (self._outgoing[peer] or self._incoming[peer]) and self._is_silent(link):
                self._drop(peer, TransferError(_silence()))
                self._watch(peer)

    def _is_silent(self, link: socket.socket) -> bool:
        try:
            return is_silent(link, TIMEOUTS.silence)
        except OSError:  # it has been closed, or has failed: whoever uses it finds out
            return False

    def check_ranks(self) -> None:
        links = dict(self._links)
        looking = select.poll()
        try:
            for link in links.values():
                looking.register(link, _ENDED)
        except ValueError:  # it is being closed on this rank
            return
        ended = {descriptor for descriptor, _ in looking.poll(0)}
        for peer, link in links.items():
            if link.fileno() in ended:
                raise LostRank(peer, _silence() if _has_timed_out(link) else "connection closed by peer")
            if self._is_silent(link):
                raise LostRank(peer, _silence())

    def _watch(self, peer: int) -> None:
        """Let poll() report just what is waited for."""
        wanted = (select.POLLIN if self._incoming[peer] else 0) | (select.POLLOUT if self._outgoing[peer] else 0)
        if wanted == self._watched[peer]:
            return
        try:
            if wanted:
                self._poll.register(self._links[peer], wanted)
            else:
                self._poll.unregister(self._links[peer])
        except ValueError:  # a signal has closed it in this very thread; whoever waits looks for that
            if not self._closed:
                raise
        self._watched[peer] = wanted

    def close(self) -> None:
        """Close all connections, and wake a thread that waits.

        A forked process has the same connections: it closes its own descriptors, and the parent's stay connected.
        """
        self._closed = True
        if os.getpid() != self._process:
            self._release()
            return
        for link in self._links.values():
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer was faster, or it is closed already
                continue
        with self._turn:
            self._release()


def _has_timed_out(link: socket.socket) -> bool:
    try:
        return link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT
    except OSError:  # another thread has closed it meanwhile
        return False


def _silence() -> str:
    return f"no sign of life from its host for {TIMEOUTS.silence:g} s"


def _close_all(links: Iterable[socket.socket]) -> None:
    for link in links:
        link.close()
