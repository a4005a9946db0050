"""Latency and bandwidth between rank 0 and others, by messages of the communicator that training would use."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from oktopk.comm import Communicator, gather_json, pack, packed_bytes

MOST = 16
"""So many peers are tried at most, spread evenly over the ranks."""
ROUND_TRIPS = 20
FIRST, LARGEST = 1 << 16, 1 << 24
ENOUGH = 0.1
"""Seconds of a round trip from which on a message is large enough to tell the bandwidth."""
PHASE = "doctor links"


def links(comm: Communicator) -> list[dict[str, Any]]:
    """On all ranks: what rank 0 has measured with each peer, one after the other."""
    peers = chosen_peers(comm.world)
    found = [_link(comm, peer) for peer in peers] if comm.rank == 0 else []
    if comm.rank in peers:
        _echo(comm)
    measured: list[dict[str, Any]] = gather_json(comm, found, PHASE)[0]
    return measured


def chosen_peers(world: int) -> list[int]:
    """
    >>> chosen_peers(4), len(chosen_peers(1000)), chosen_peers(1000)[-1]
    ([1, 2, 3], 16, 999)
    """
    others = world - 1
    return [1 + (part + 1) * others // min(MOST, others) - 1 for part in range(min(MOST, others))]


def _link(comm: Communicator, peer: int) -> dict[str, Any]:
    _round_trip(comm, peer, 1)  # the first message makes the connection
    small = statistics.median(_round_trip(comm, peer, 1) for _ in range(ROUND_TRIPS))
    size, seconds = FIRST, _bulk(comm, peer, FIRST) - small
    while seconds < ENOUGH and size < LARGEST:
        size *= 4
        seconds = _bulk(comm, peer, size) - small
    comm.send(_message(0), peer, PHASE)  # nothing: the end
    rate = 2 * size / max(seconds, 1e-9)
    return {"peer": peer, "latency_seconds": small / 2, "bytes_per_second": rate, "bytes": size}


def _bulk(comm: Communicator, peer: int, size: int) -> float:
    return min(_round_trip(comm, peer, size) for _ in range(2))


def _round_trip(comm: Communicator, peer: int, size: int) -> float:
    message = _message(size)
    start = time.perf_counter()
    comm.send(message, peer, PHASE)
    comm.recv(packed_bytes(LARGEST), peer, PHASE)
    return time.perf_counter() - start


def _echo(comm: Communicator) -> None:
    """Send back what rank 0 sends, until it sends nothing."""
    while (message := comm.recv(packed_bytes(LARGEST), 0, PHASE)).numel() > packed_bytes(0):
        comm.send(message, 0, PHASE)


def _message(size: int) -> torch.Tensor:
    return pack(torch.zeros(size, dtype=torch.uint8))
