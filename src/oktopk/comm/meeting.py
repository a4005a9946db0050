"""How ranks that share a store connect to each other by TCP."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from datetime import timedelta
from typing import Any

SECRET = 16
"""Bytes that only who can read the store knows: a stranger who finds the port is not let in."""
_HELLO = struct.Struct(f"<{SECRET}sI")
_INTERFACES = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_PATIENCE = 2.0
"""Seconds that somebody who has connected may take to say who it is."""


def connect_all(store: Any, rank: int, world: int, deadline: float) -> dict[int, socket.socket]:
    """A connection to every other rank; all of them call it. Lower ranks are called, and higher ones call."""
    host, secret = own_address(store), secrets.token_bytes(SECRET)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    links: dict[int, socket.socket] = {}
    with socket.create_server((host, 0), family=family, backlog=world) as listener:
        store.set(f"address/{rank}", f"{secret.hex()} {listener.getsockname()[1]} {host}")
        try:
            for peer in range(rank):
                links[peer] = _call(_look_up(store, peer, deadline), secret, rank, deadline)
            while len(links) < world - 1:
                _answer(listener, links, secret, store, range(rank + 1, world), deadline)
        except BaseException:
            for link in links.values():
                link.close()
            raise
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def own_address(store: Any) -> str:
    """Where other ranks find this one: at the interface that gloo was told, or on the way to the store's host."""
    interface = os.environ.get(_INTERFACES, "").split(",")[0]
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


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not all ranks have connected in time")
    return left


def _look_up(store: Any, peer: int, deadline: float) -> tuple[bytes, int, str]:
    """(secret, port, host) of a rank."""
    key = f"address/{peer}"
    store.wait([key], timedelta(seconds=_left(deadline)))
    secret, port, host = store.get(key).decode().split(" ")
    return bytes.fromhex(secret), int(port), host


def _call(address: tuple[bytes, int, str], secret: bytes, rank: int, deadline: float) -> socket.socket:
    theirs, port, host = address
    link = socket.create_connection((host, port), timeout=_left(deadline))
    try:
        link.sendall(_HELLO.pack(theirs, rank))
        link.settimeout(_left(deadline))
        if not hmac.compare_digest(_exactly(link, SECRET), secret):
            raise ConnectionError(f"somebody else answers at {host}, port {port}")
    except BaseException:
        link.close()
        raise
    return link


def _answer(
    listener: socket.socket,
    links: dict[int, socket.socket],
    secret: bytes,
    store: Any,
    expected: range,
    deadline: float,
) -> None:
    """Take one call; a stranger's is hung up on."""
    listener.settimeout(_left(deadline))
    link, _ = listener.accept()
    peer = _identify(link, secret, expected, deadline)
    if peer is None or peer in links:
        link.close()
        return
    links[peer] = link
    link.sendall(_look_up(store, peer, deadline)[0])


def _identify(link: socket.socket, secret: bytes, expected: range, deadline: float) -> int | None:
    """Which of the ranks that are expected has called; None if it is a stranger."""
    link.settimeout(min(_PATIENCE, _left(deadline)))
    try:
        said, rank = _HELLO.unpack(_exactly(link, _HELLO.size))
    except OSError:
        return None
    return rank if rank in expected and hmac.compare_digest(said, secret) else None


def _exactly(link: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = link.recv(size - len(got))
        if not more:
            raise ConnectionError("it has hung up")
        got += more
    return got
