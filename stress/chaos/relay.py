"""A relay between ranks: it passes on the bytes of their connections, and disturbs them once when it is told to.

    rank 2 ──► relay ──► rank 0        each connection has a thread of the relay

In the process of a rank, `through_relay` sends the connections for messages this way, and `gloo_through_relay`
those of gloo. The relay runs in the process that judges, so that it outlives every rank.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

HARMLESS = ("late bytes", "split bytes")
BYTE_FAULTS = (
    *HARMLESS, "corrupt bytes", "repeated bytes", "missing bytes", "connection cut", "connection reset"
)  # fmt: skip
ANY = None
"""In place of a link: whichever has something to pass on. gloo does not tell who connects."""
Link = tuple[int, int]
"""From which rank to which one."""
_CHUNK = 1 << 16
_SINGLE = 64
"""So many bytes are passed on one by one."""
_RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: close() resets the connection."""


@dataclass
class Strike:
    """What happens to the bytes of a link, `skip` bytes from the moment at which the relay is told."""

    kind: str
    link: Link | None
    skip: int
    seconds: float
    seed: int
    done: bool = False


class Ended(Exception):
    """The relay has ended a connection."""


class Relay:
    """Listens on loopback until it is closed."""

    def __init__(self) -> None:
        self.strike: Strike | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = {self._listener}
        self._lock = threading.Lock()
        self._start(self._accept_all, self._listener, self._greet)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # wakes its thread
        for thread in self._threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self._threads), "a thread of the relay hangs"

    def _start(self, job: Any, *args: Any) -> None:
        thread = threading.Thread(target=job, args=args, name="relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    @contextlib.contextmanager
    def _known(self, *connections: socket.socket) -> Iterator[None]:
        """While they are open, closing the relay wakes who waits for them."""
        with self._lock:
            self._open.update(connections)
        try:
            yield
        finally:
            with self._lock:
                self._open.difference_update(connections)
            for one in connections:
                one.close()

    def _accept_all(self, listener: socket.socket, serve: Any, *args: Any) -> None:
        with self._known(listener), contextlib.suppress(OSError):
            while True:
                self._start(serve, listener.accept()[0], *args)

    def _greet(self, link: socket.socket) -> None:
        """A rank says what it wants: a connection to another one, or a port that leads to itself."""
        asked = json.loads(_line(link))
        target = asked["host"], asked["port"]
        if "peer" in asked:
            self._connect(link, target, (asked["rank"], asked["peer"]))
            return
        listener = _listen_beside(*target)
        self._start(self._accept_all, listener, self._connect, target, ANY)
        with link:
            link.sendall(f"{listener.getsockname()[1]}\n".encode())

    def _connect(self, link: socket.socket, target: tuple[str, int], ranks: Link | None) -> None:
        try:
            other = socket.create_connection(target, 20)
        except OSError:  # the rank is gone; so is the connection to it
            link.close()
            return
        other.settimeout(None)
        back = ranks and (ranks[1], ranks[0])
        for one in (link, other):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._known(link, other), contextlib.suppress(OSError, Ended):
            while True:
                for source in select.select([link, other], [], [])[0]:
                    data = source.recv(_CHUNK)
                    if not data:
                        return
                    sink, towards = (other, ranks) if source is link else (link, back)
                    self._pass_on(data, source, sink, towards)

    def _pass_on(self, data: bytes, source: socket.socket, sink: socket.socket, link: Link | None) -> None:
        strike = self.strike
        if strike is None or strike.done or strike.link != link:
            sink.sendall(data)
        elif strike.skip >= len(data):
            strike.skip -= len(data)
            sink.sendall(data)
        else:
            strike.done = True
            sink.sendall(data[: strike.skip])
            _disturb(strike, data[strike.skip :], (source, sink))


def _disturb(strike: Strike, data: bytes, ends: tuple[socket.socket, socket.socket]) -> None:
    """Pass on what comes after the place of the strike, or not."""
    chance, sink = random.Random(strike.seed), ends[1]
    some = min(len(data), chance.choice((1, 1, 8, 40)))
    if strike.kind == "connection cut":
        raise Ended
    if strike.kind == "connection reset":
        for one in ends:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise Ended
    if strike.kind == "late bytes":
        time.sleep(strike.seconds)
    elif strike.kind == "split bytes":
        for place in range(min(_SINGLE, len(data))):
            sink.sendall(data[place : place + 1])
        data = data[_SINGLE:]
    elif strike.kind == "repeated bytes":
        data = data[:some] + data
    elif strike.kind == "missing bytes":
        data = data[some:]
    elif strike.kind == "corrupt bytes":
        masks = [1 << chance.randrange(8)] if some == 1 else [chance.randrange(1, 256) for _ in range(some)]
        data = bytes(byte ^ mask for byte, mask in zip(data[:some], masks, strict=True)) + data[some:]
    else:
        raise ValueError(f"no such fault: {strike.kind}")
    sink.sendall(data)


def _listen_beside(host: str, port: int) -> socket.socket:
    """At a port that compares to those of others as the given one does.

    Of two ranks, gloo lets the one connect whose port is larger, with its two bytes swapped.
    """
    for distance in (256, -256, 512, -512, 768, -768):
        with contextlib.suppress(OSError, OverflowError):
            return socket.create_server((host, port + distance), backlog=64)
    raise OSError(f"no free port beside {port}")


def _line(link: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n"):
        more = link.recv(1)
        if not more:
            raise ConnectionError("no whole line")
        said += more
    return said


# In the process of a rank.


@contextlib.contextmanager
def through_relay(rank: int, port: int, folder: Path) -> Iterator[None]:
    """Whatever Python connects to other ranks of this folder goes through the relay at that port."""
    connect, serve = socket.create_connection, socket.create_server

    def create_server(*args: Any, **options: Any) -> socket.socket:
        listener = serve(*args, **options)
        (folder / f"port {listener.getsockname()[1]}").write_text(str(rank))
        return listener

    def create_connection(address: tuple[str, int], *args: Any, **options: Any) -> socket.socket:
        known = folder / f"port {address[1]}"
        if not known.exists():
            return connect(address, *args, **options)
        link = connect(("127.0.0.1", port), *args, **options)
        asked = {"rank": rank, "peer": int(known.read_text()), "host": address[0], "port": address[1]}
        link.sendall(json.dumps(asked).encode() + b"\n")
        return link

    with (
        mock.patch.object(socket, "create_server", create_server),
        mock.patch.object(socket, "create_connection", create_connection),
    ):
        yield


@contextlib.contextmanager
def gloo_through_relay(port: int) -> Iterator[None]:
    """gloo groups that are made in this block find each other through the relay at that port."""
    make = dist.ProcessGroupGloo

    def made(store: Any, *args: Any) -> Any:
        return make(RelayedStore(store, port), *args)

    with mock.patch.object(dist, "ProcessGroupGloo", made):
        yield


class RelayedStore(dist.Store):
    """gloo leaves its address here: length and name of the host, length and bytes of a struct sockaddr_in."""

    def __init__(self, inner: Any, relay: int) -> None:
        super().__init__()
        self.inner, self.relay = inner, relay

    def set(self, key: str, value: bytes) -> None:
        (name,) = struct.unpack_from("<Q", value)
        place = 8 + name + 8
        family, port, host = struct.unpack_from("!2sH4s", value, place)
        assert family == b"\x02\x00", "not an IPv4 address"
        with socket.create_connection(("127.0.0.1", self.relay)) as link:
            link.sendall(json.dumps({"host": socket.inet_ntoa(host), "port": port}).encode() + b"\n")
            port = int(_line(link))
        self.inner.set(key, value[: place + 2] + struct.pack("!H", port) + value[place + 4 :])

    def get(self, key: str) -> bytes:
        return bytes(self.inner.get(key))

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        self.inner.wait(keys, *timeout)
