"""Ranks connect, and prove to each other that they belong to the job; strangers cannot.

    rank 2                                        rank 0, which listens
    hello: I am rank 2, nonce a           ──►
                                          ◄──     nonce b, proof: HMAC(key, "accept", 0, 2, a, b)
    proof: HMAC(key, "connect", 0, 2, a, b) ──►
                                          ◄──     welcome

The key never travels. Every connection is at its own point of this, and all of them are polled together: one that
says nothing delays nobody.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

from ...utils.timeouts import TIMEOUTS
from ..transport import format_ranks
from .forks import close_in_children
from .keepalive import keep_alive

Endpoint = tuple[str, int]
"""Address and port where a rank listens."""
_MAGIC, _NONCE, _PROOF = b"oktopk02", 16, hashlib.sha256().digest_size
_WELCOME = b"+"
_HELLO = struct.Struct(f"<8sI{_NONCE}s")
_ANSWER = struct.Struct(f"<{_NONCE}s{_PROOF}s")
MOST_UNIDENTIFIED = 256
"""Connections, beside those of the ranks, that may be open at once. The oldest one is closed for a new one."""


class Stranger(ConnectionError):
    """The peer is no rank of this job."""


@dataclass(eq=False)
class _Conversation:
    """A handshake under way: `steps` yields how many bytes it waits for, and returns the peer's rank."""

    link: socket.socket
    steps: Generator[int, bytes, int]
    deadline: float
    peer: int | None
    """The rank that was called; None for whoever has called."""
    wanted: int = 0
    received: bytes = b""

    def advance(self) -> int | None:
        """Read what is there; returns the peer once it is identified."""
        try:
            if not self.wanted:
                self.wanted = next(self.steps)
            while True:
                more = self.link.recv(self.wanted - len(self.received))
                if not more:
                    raise ConnectionError("connection closed by peer")
                self.received += more
                if len(self.received) == self.wanted:
                    whole, self.received = self.received, b""
                    self.wanted = self.steps.send(whole)
        except BlockingIOError:
            return None
        except StopIteration as done:
            return int(done.value)


class Handshake:
    """One rank's part of connecting all: it connects to the ranks before it, and accepts those after it.

    Args:
        rank: This rank.
        endpoints: Where each rank listens.
        key: What only ranks of this job know.
        deadline: The moment of time.monotonic() at which all must be connected.
    """

    def __init__(self, rank: int, endpoints: list[Endpoint], key: bytes, deadline: float) -> None:
        self._rank, self._endpoints, self._key, self._deadline = rank, endpoints, key, deadline
        self._missing = set(range(len(endpoints))) - {rank}
        self._poll = select.poll()
        self._open: dict[int, _Conversation] = {}
        self._again: dict[int, float] = {}
        """When to call which rank once more."""

    def connect(self, listener: socket.socket) -> dict[int, socket.socket]:
        """A connection to every other rank."""
        links: dict[int, socket.socket] = {}
        with ExitStack() as undo:
            undo.callback(self._close_unidentified)
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)
            for peer in range(self._rank):
                self._call(peer)
            while self._missing:
                for descriptor, _ in self._poll.poll(1e3 * self._pause()):
                    if descriptor == listener.fileno():
                        self._accept(listener)
                    elif descriptor in self._open:  # it may just have been closed for a new one
                        self._advance(self._open[descriptor], links, undo)
                self._look_at_clock()
            self._close_unidentified()
            for link in links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(link, TIMEOUTS.silence)
            undo.pop_all()
        return links

    def _call(self, peer: int) -> None:
        host, port = self._endpoints[peer]
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        link = socket.socket(family, kind, protocol)
        self._begin(link, self._introduce(link, peer), self._deadline, peer)
        code = link.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise self._describe(peer, OSError(code, os.strerror(code)))

    def _accept(self, listener: socket.socket) -> None:
        strangers = [one for one in self._open.values() if one.peer is None]
        try:
            link = listener.accept()[0]
        except (BlockingIOError, ConnectionError):  # whoever it was has hung up already
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not strangers:
                raise
            self._close(strangers[0])  # whoever calls is still there in the next round
            return
        if len(strangers) >= MOST_UNIDENTIFIED + len(self._endpoints):
            self._close(strangers[0])
        self._begin(link, self._answer(link), time.monotonic() + TIMEOUTS.handshake, None)

    def _begin(
        self, link: socket.socket, steps: Generator[int, bytes, int], deadline: float, peer: int | None
    ) -> None:
        link.setblocking(False)
        close_in_children(link)
        self._open[link.fileno()] = _Conversation(link, steps, deadline, peer)
        self._poll.register(link, select.POLLIN if peer is None else select.POLLOUT)

    def _advance(self, one: _Conversation, links: dict[int, socket.socket], undo: ExitStack) -> None:
        try:
            if one.peer is not None:
                code = one.link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                self._poll.modify(one.link, select.POLLIN)
            found = one.advance()
        except OSError as error:
            self._close(one)
            if one.peer is None:  # it was a stranger
                return
            if isinstance(error, Stranger) or not one.wanted:
                raise self._describe(one.peer, error) from error
            self._again[one.peer] = time.monotonic() + TIMEOUTS.pause  # it is there, but has too many callers
            return
        if found in self._missing:
            self._missing.discard(found)
            self._forget(one)
            links[found] = undo.enter_context(one.link)
        elif found is not None:
            self._close(one)

    def _introduce(self, link: socket.socket, peer: int) -> Generator[int, bytes, int]:
        """The side that connects."""
        nonce = secrets.token_bytes(_NONCE)
        link.send(_HELLO.pack(_MAGIC, self._rank, nonce))
        theirs, proof = _ANSWER.unpack((yield _ANSWER.size))
        if not hmac.compare_digest(proof, self._prove(b"accept", peer, self._rank, nonce, theirs)):
            raise Stranger("handshake failed: unexpected peer")
        link.send(self._prove(b"connect", peer, self._rank, nonce, theirs))
        yield len(_WELCOME)
        return peer

    def _answer(self, link: socket.socket) -> Generator[int, bytes, int]:
        """The side that listens."""
        magic, peer, nonce = _HELLO.unpack((yield _HELLO.size))
        if magic != _MAGIC or not self._rank < peer < len(self._endpoints):
            raise Stranger("not a rank of this job")
        own = secrets.token_bytes(_NONCE)
        link.send(_ANSWER.pack(own, self._prove(b"accept", self._rank, peer, nonce, own)))
        if not hmac.compare_digest((yield _PROOF), self._prove(b"connect", self._rank, peer, nonce, own)):
            raise Stranger("handshake failed: wrong key")
        link.send(_WELCOME)
        return int(peer)

    def _prove(self, side: bytes, listening: int, calling: int, nonce: bytes, answer: bytes) -> bytes:
        said = struct.pack("<8sII", side, listening, calling) + nonce + answer
        return hmac.digest(self._key, said, "sha256")

    def _pause(self) -> float:
        """Seconds until something is due."""
        due = [self._deadline, *self._again.values(), *(one.deadline for one in self._open.values())]
        return max(0.0, min(due) - time.monotonic())

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._missing and now >= self._deadline:
            raise TimeoutError(f"timed out waiting for {format_ranks(sorted(self._missing))} to connect")
        for one in [one for one in self._open.values() if now >= one.deadline]:
            self._close(one)
        for peer in [peer for peer, when in self._again.items() if now >= when]:
            del self._again[peer]
            self._call(peer)

    def _describe(self, peer: int, error: OSError) -> ConnectionError:
        host, port = self._endpoints[peer]
        return ConnectionError(f"rank {peer} at {host}, port {port}: {error}")

    def _forget(self, one: _Conversation) -> None:
        self._poll.unregister(one.link)
        del self._open[one.link.fileno()]

    def _close(self, one: _Conversation) -> None:
        self._forget(one)
        one.link.close()

    def _close_unidentified(self) -> None:
        for one in list(self._open.values()):
            self._close(one)


def derive_key(secret: bytes | None, session: bytes) -> bytes:
    """The key of one session. Without a secret it is worth as much as the session is unknown to others."""
    return hmac.digest(secret or b"oktopk", b"session " + session, "sha256")
