"""A relay between ranks: it passes on the bytes of their connections, and disturbs them once when it is told to.

    rank 2 ──► relay ──► rank 0        each connection has a thread of the relay

It runs in the process that judges, so that it outlives every rank; `relayed` has the part of the ranks.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HARMLESS = ("late bytes", "split bytes")
BYTE_FAULTS = (
    *HARMLESS, "corrupt bytes", "repeated bytes", "missing bytes", "connection cut", "connection reset"
)  # fmt: skip
ANY = None
"""In place of a link: whichever has something to pass on. gloo does not tell who connects."""
Link = tuple[int, int]
"""From which rank to which one."""
_serve = socket.create_server
"""As it is without `relayed`, which the tests use in the same process."""
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
    """Listens on loopback until it is closed.

    Args:
        folder: Where ranks note which port they connect from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.strike: Strike | None = None
        self._listener = _serve(("127.0.0.1", 0), backlog=64)
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
        """Tell a rank the port that leads to where it listens; who connects there, only ranks of the mesh say."""
        asked = json.loads(read_line(link))
        target = asked["host"], asked["port"]
        listener = _listen_beside(*target)
        self._start(self._accept_all, listener, self._connect, target, asked["rank"])
        with link:
            link.sendall(f"{listener.getsockname()[1]}\n".encode())

    def _connect(self, link: socket.socket, target: tuple[str, int], rank: int | None) -> None:
        try:
            note = self.folder / f"source {link.getpeername()[1]}"
            ranks = ANY if rank is None else (int(note.read_text()), rank)
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
            return _serve((host, port + distance), backlog=64)
    raise OSError(f"no free port beside {port}")


def read_line(link: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n"):
        more = link.recv(1)
        if not more:
            raise ConnectionError("no whole line")
        said += more
    return said
