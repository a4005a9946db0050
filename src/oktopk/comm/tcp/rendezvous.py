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
from ...utils.timeouts import TIMEOUTS
from ..process_group.gloo_abort import INTERFACES
from ..transport import format_ranks

SECRET = 16
"""Bytes that only readers of the store know: others who find the port are rejected."""
_HELLO = struct.Struct(f"<{SECRET}sI")
_SIOCGIFADDR = 0x8915
_UNREACHABLE = "-"


def tcp_allowed() -> bool:
    """Whether the environment allows plain TCP: not if it asks for gloo, or for encryption."""
    wanted = os.environ.get("OKTOPK_MESSAGES", "tcp")
    if wanted not in ("tcp", "gloo"):
        raise CommError(f"OKTOPK_MESSAGES must be tcp or gloo, got {wanted!r}")
    plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() == "TCP"
    return wanted == "tcp" and plain and hasattr(select, "poll")


def connect_all(store: Any, rank: int, world: int, deadline: float) -> dict[int, socket.socket]:
    """A connection to every other rank: each rank connects to those before it, and accepts those after it."""
    secret = secrets.token_bytes(SECRET)
    try:
        host = local_address(store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=world)
    except OSError:
        store.set(_key(rank), _UNREACHABLE)  # so that no rank waits for it
        raise
    with listener:
        store.set(_key(rank), f"{secret.hex()} {listener.getsockname()[1]} {host}")
        return _Rendezvous(rank, secret, _addresses(store, world, deadline), deadline).connect(listener)


def local_address(store: Any) -> str:
    """Where other ranks reach this one: at gloo's interface, or at the one from which the store is reached."""
    interface = os.environ.get(INTERFACES, "").split(",")[0]
    if interface:
        import fcntl  # not on every system; nor are names of interfaces

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None) or _resolve_own_host(), getattr(store, "port", None) or 1
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the system only chooses a route
        return str(probe.getsockname()[0])


def _resolve_own_host() -> str:
    """For stores without a host: in files, or in memory."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # its name has no address: then all ranks are on this host
        return "127.0.0.1"


class _Address(NamedTuple):
    secret: bytes
    port: int
    host: str


def _key(rank: int) -> str:
    return f"address/{rank}"


def _addresses(store: Any, world: int, deadline: float) -> list[_Address]:
    """Those of all ranks, from the store."""
    keys = [_key(rank) for rank in range(world)]
    store.wait(keys, timedelta(seconds=_remaining(deadline)))
    entries = [text.decode().split(" ") for text in store.multi_get(keys)]
    unreachable = [rank for rank, words in enumerate(entries) if words == [_UNREACHABLE]]
    if unreachable:
        raise ConnectionError(f"{format_ranks(unreachable)} has no reachable address")
    return [_Address(bytes.fromhex(secret), int(port), host) for secret, port, host in entries]


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class _Rendezvous:
    """One rank's part of connecting all."""

    def __init__(self, rank: int, secret: bytes, addresses: list[_Address], deadline: float) -> None:
        self.rank, self.secret, self.addresses, self.deadline = rank, secret, addresses, deadline

    def connect(self, listener: socket.socket) -> dict[int, socket.socket]:
        links: dict[int, socket.socket] = {}
        with ExitStack() as undo:
            for peer in range(self.rank):
                links[peer] = self._connect_to(peer, undo)
            while missing := [peer for peer in range(self.rank + 1, len(self.addresses)) if peer not in links]:
                link = self._accept(listener, missing)
                found = self._identify(link, missing)
                if found is None:
                    link.close()
                else:
                    links[found] = undo.enter_context(link)
                    link.sendall(self.addresses[found].secret)
            for link in links.values():
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            undo.pop_all()
        return links

    def _connect_to(self, peer: int, undo: ExitStack) -> socket.socket:
        secret, port, host = self.addresses[peer]
        try:
            link = socket.create_connection((host, port), timeout=_remaining(self.deadline))
            undo.enter_context(link)
            link.sendall(_HELLO.pack(secret, self.rank))
            if not hmac.compare_digest(_recv_exactly(link, SECRET, self.deadline), self.secret):
                raise ConnectionError("handshake failed: unexpected peer")
        except OSError as error:
            raise ConnectionError(f"rank {peer} at {host}, port {port}: {error}") from error
        return link

    def _accept(self, listener: socket.socket, missing: list[int]) -> socket.socket:
        try:
            listener.settimeout(_remaining(self.deadline))
            return listener.accept()[0]
        except TimeoutError as error:
            raise TimeoutError(f"timed out waiting for {format_ranks(missing)} to connect") from error

    def _identify(self, link: socket.socket, missing: list[int]) -> int | None:
        """Which of the missing ranks has connected; None if it is a stranger."""
        try:
            hello = _recv_exactly(link, _HELLO.size, min(self.deadline, time.monotonic() + TIMEOUTS.handshake))
        except OSError:
            return None
        secret, rank = _HELLO.unpack(hello)
        return rank if rank in missing and hmac.compare_digest(secret, self.secret) else None


def _recv_exactly(link: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        link.settimeout(_remaining(deadline))
        more = link.recv(size - len(received))
        if not more:
            raise ConnectionError("connection closed by peer")
        received += more
    return received
