"""Ranks that are connected by TCP, in threads of one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from oktopk.comm.tcp.handshake import Endpoint, Handshake
from oktopk.comm.tcp.mesh import Mesh
from oktopk.comm.tcp.rendezvous import advertise, listen

KEY = b"the key of these ranks"


def listeners(world: int) -> list[socket.socket]:
    return [listen("127.0.0.1", world) for _ in range(world)]


def join(
    rank: int, listener: socket.socket, endpoints: list[Endpoint], key: bytes = KEY, patience: float = 30.0
) -> dict[int, socket.socket]:
    """One rank connects to the others."""
    with listener:
        return Handshake(rank, endpoints, key, time.monotonic() + patience).connect(listener)


def meet(world: int) -> list[dict[int, socket.socket]]:
    """The connections of each rank."""
    there = listeners(world)
    endpoints = [advertise(listener) for listener in there]
    with ThreadPoolExecutor(world) as pool:
        calls = [pool.submit(join, rank, listener, endpoints) for rank, listener in enumerate(there)]
        return [call.result() for call in calls]


def close(links: list[dict[int, socket.socket]]) -> None:
    for link in (link for own in links for link in own.values()):
        link.close()


@contextmanager
def meshes(world: int) -> Iterator[list[Mesh]]:
    made = [Mesh(links) for links in meet(world)]
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()
