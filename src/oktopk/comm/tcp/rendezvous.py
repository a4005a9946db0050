"""How ranks that share a store connect to each other by TCP."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

from ...errors import CommError
from ..base import listed
from ..gloo_abort import INTERFACES

SECRET = 16
"""Bytes that only who can read the store knows: a stranger who finds the port is not let in."""
MEETING = 20.0
"""Seconds that ranks take at most: they have all met just before."""
_HELLO = struct.Struct(f"<{SECRET}sI")
_SIOCGIFADDR = 0x8915
_NOWHERE = "-"
_PATIENCE = 5.0
"""Seconds that somebody who has connected may take to say who it is."""


def tcp_allowed() -> bool:
    """Not if somebody wants gloo's own connections, or encrypted ones."""
    wanted = os.environ.get("OKTOPK_MESSAGES", "tcp")
    if wanted not in ("tcp", "gloo"):
        raise CommError(f"OKTOPK_MESSAGES must be tcp or gloo, got {wanted!r}")
    plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() == "TCP"
    return wanted == "tcp" and plain and hasattr(select, "poll")


def connect_all(store: Any, rank: int, world: int, deadline: float) -> dict[int, socket.socket]:
    """A connection to every other rank, who all do the same: each calls those before it, those after it call."""
    secret = secrets.token_bytes(SECRET)
    try:
        host = own_address(store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=world)
    except OSError:
        store.set(_key(rank), _NOWHERE)  # so that nobody waits for a call
        raise
    with listener:
        store.set(_key(rank), f"{secret.hex()} {listener.getsockname()[1]} {host}")
        return _Meeting(rank, secret, _addresses(store, world, deadline), deadline).connect(listener)


def own_address(store: Any) -> str:
    """Where other ranks find this one: at the interface that gloo was told, or on the way to the store's host."""
    interface = os.environ.get(INTERFACES, "").split(",")[0]
    if interface:
        import fcntl  # not everywhere; nor are names of interfaces

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None) or _own_name(), getattr(store, "port", None) or 1
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the system only looks which way it would go
        return str(probe.getsockname()[0])


def _own_name() -> str:
    """Of this host, for stores that have none: in files, or in memory."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # nobody knows it: then all ranks are here
        return "127.0.0.1"


class _Address(NamedTuple):
    secret: bytes
    port: int
    host: str


def _key(rank: int) -> str:
    return f"address/{rank}"


def _addresses(store: Any, world: int, deadline: float) -> list[_Address]:
    """Of all ranks, who have left them in the store."""
    keys = [_key(rank) for rank in range(world)]
    store.wait(keys, timedelta(seconds=_left(deadline)))
    said = [text.decode().split(" ") for text in store.multi_get(keys)]
    nowhere = [rank for rank, words in enumerate(said) if words == [_NOWHERE]]
    if nowhere:
        raise ConnectionError(f"{listed(nowhere)} cannot be called")
    return [_Address(bytes.fromhex(secret), int(port), host) for secret, port, host in said]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


class _Meeting:
    """One rank's part in it."""

    def __init__(self, rank: int, secret: bytes, addresses: list[_Address], deadline: float) -> None:
        self.rank, self.secret, self.addresses, self.deadline = rank, secret, addresses, deadline

    def connect(self, listener: socket.socket) -> dict[int, socket.socket]:
        links: dict[int, socket.socket] = {}
        try:
            for peer in range(self.rank):
                links[peer] = self._call(peer)
            while missing := [peer for peer in range(self.rank + 1, len(self.addresses)) if peer not in links]:
                self._answer(listener, missing, links)
            for link in links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return links

    def _call(self, peer: int) -> socket.socket:
        secret, port, host = self.addresses[peer]
        try:
            with ExitStack() as undo:
                link = undo.enter_context(socket.create_connection((host, port), timeout=_left(self.deadline)))
                link.sendall(_HELLO.pack(secret, self.rank))
                if not hmac.compare_digest(_exactly(link, SECRET, self.deadline), self.secret):
                    raise ConnectionError("somebody else answers")
                undo.pop_all()
                return link
        except OSError as error:
            raise ConnectionError(f"rank {peer} at {host}, port {port}: {error}") from error

    def _answer(self, listener: socket.socket, missing: list[int], links: dict[int, socket.socket]) -> None:
        """Take one call; a stranger's is hung up on."""
        try:
            listener.settimeout(_left(self.deadline))
            link, _ = listener.accept()
        except TimeoutError as error:
            raise TimeoutError(f"{listed(missing)} did not call in time") from error
        peer = self._identify(link, missing)
        if peer is None:
            link.close()
        else:
            links[peer] = link
            link.sendall(self.addresses[peer].secret)

    def _identify(self, link: socket.socket, missing: list[int]) -> int | None:
        """Which of the ranks that are missing has called; None if it is a stranger."""
        try:
            hello = _exactly(link, _HELLO.size, min(self.deadline, time.monotonic() + _PATIENCE))
        except OSError:
            return None
        said, rank = _HELLO.unpack(hello)
        return rank if rank in missing and hmac.compare_digest(said, self.secret) else None


def _exactly(link: socket.socket, size: int, deadline: float) -> bytes:
    got = b""
    while len(got) < size:
        link.settimeout(_left(deadline))
        more = link.recv(size - len(got))
        if not more:
            raise ConnectionError("it has hung up")
        got += more
    return got
