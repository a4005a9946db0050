"""Measure latency and bandwidth between rank 0 and other ranks, over the communicator that training uses."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from oktopk.comm import Communicator, gather_json, pack, packed_bytes

MOST = 16
"""Limit on peers to measure, spread evenly over the ranks."""
ROUND_TRIPS = 20
FIRST, LARGEST = 1 << 16, 1 << 24
ENOUGH = 0.1
"""Grow the message until a round trip takes this many seconds, long enough to measure the bandwidth."""
PHASE = "doctor links"


def measure_links(comm: Communicator) -> list[dict[str, Any]]:
    """Measure the link from rank 0 to each peer, one after the other; all ranks return the result."""
    peers = choose_peers(comm.world)
    found = [_measure_link(comm, peer) for peer in peers] if comm.rank == 0 else []
    if comm.rank in peers:
        _echo(comm)
    measured: list[dict[str, Any]] = gather_json(comm, found, PHASE)[0]
    return measured


def choose_peers(world: int) -> list[int]:
    """
    >>> choose_peers(4), len(choose_peers(1000)), choose_peers(1000)[-1]
    ([1, 2, 3], 16, 999)
    """
    others = world - 1
    return [1 + (part + 1) * others // min(MOST, others) - 1 for part in range(min(MOST, others))]


def _measure_link(comm: Communicator, peer: int) -> dict[str, Any]:
    _round_trip(comm, peer, 1)  # the first message opens the connection
    small = statistics.median(_round_trip(comm, peer, 1) for _ in range(ROUND_TRIPS))
    size, seconds = FIRST, _bulk(comm, peer, FIRST) - small
    while seconds < ENOUGH and size < LARGEST:
        size *= 4
        seconds = _bulk(comm, peer, size) - small
    comm.send(_message(0), peer, PHASE)  # an empty message ends the echo
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
    """Echo the messages of rank 0 until it sends an empty one."""
    while (message := comm.recv(packed_bytes(LARGEST), 0, PHASE)).numel() > packed_bytes(0):
        comm.send(message, 0, PHASE)


def _message(size: int) -> torch.Tensor:
    return pack(torch.zeros(size, dtype=torch.uint8))
