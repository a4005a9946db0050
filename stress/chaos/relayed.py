"""In the process of a rank: connections that go through the relay, those for messages or those of gloo."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from stress.chaos.relay import read_line


def _port_to(host: str, port: int, rank: int | None, relay: int) -> int:
    """The port of the relay that leads to this one."""
    with socket.create_connection(("127.0.0.1", relay)) as link:
        link.sendall(json.dumps({"host": host, "port": port, "rank": rank}).encode() + b"\n")
        return int(read_line(link))


class _Advertised(socket.socket):
    """A listener that has the name of another one."""

    name: tuple[str, int]

    def getsockname(self) -> tuple[str, int]:
        return self.name


@contextlib.contextmanager
def through_relay(rank: int, relay: int, folder: Path) -> Iterator[None]:
    """What Python listens at in this block is advertised as a port of the relay, and connects say who they are."""
    serve = socket.create_server

    def create_server(*args: Any, **options: Any) -> socket.socket:
        real = serve(*args, **options)
        host, port = real.getsockname()[:2]
        listener = _Advertised(real.family, real.type, real.proto, real.detach())
        listener.name = host, _port_to(host, port, rank, relay)
        return listener

    def saying_who(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
        def connect_from_known_port(link: socket.socket, address: Any) -> Any:
            if link.type == socket.SOCK_STREAM:
                link.bind(("", 0))
                (folder / f"source {link.getsockname()[1]}").write_text(str(rank))
            return connect(link, address)

        return connect_from_known_port

    with (
        mock.patch.object(socket, "create_server", create_server),
        mock.patch.object(socket.socket, "connect", saying_who(socket.socket.connect)),
        mock.patch.object(socket.socket, "connect_ex", saying_who(socket.socket.connect_ex)),
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
        port = _port_to(socket.inet_ntoa(host), port, None, self.relay)
        self.inner.set(key, value[: place + 2] + struct.pack("!H", port) + value[place + 4 :])

    def get(self, key: str) -> bytes:
        return bytes(self.inner.get(key))

    def wait(self, keys: Sequence[str], *timeout: Any) -> None:
        self.inner.wait(keys, *timeout)
