"""The network model: the cost of a message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oktopk.errors import OkTopkError
from oktopk.tools.lab import parse_rate

_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|µs|ms|s)")
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class SimulationError(OkTopkError, ValueError):
    """A simulation that is not possible."""


@dataclass(frozen=True)
class Network:
    """A full-duplex link for each rank, and a switch between them that is never the bottleneck.

    The sender's link transmits messages one after the other, each in bytes / bandwidth seconds. The first byte
    reaches the receiver's link after `latency`, where messages queue in the same way. Latencies overlap; the
    overhead of a message occupies the rank and does not.
    """

    latency: float
    """α, seconds."""
    bandwidth: float
    """β, bytes per second and direction."""
    overhead: float | None = None
    """Seconds that a rank spends on a message: half to send, half to receive. None until measured."""

    def __str__(self) -> str:
        link = f"{self.bandwidth * 8e-9:.4g} Gbit/s, {self.latency * 1e6:.4g} µs"
        return link if self.overhead is None else f"{link}, {self.overhead * 1e6:.4g} µs per message"


def parse_network(text: str) -> Network:
    """
    >>> print(parse_network("10gbit:50us"))
    10 Gbit/s, 50 µs
    >>> print(parse_network("10gbit:50us:4us"))
    10 Gbit/s, 50 µs, 4 µs per message
    """
    rate, *delays = text.split(":")
    try:
        bandwidth = parse_rate(rate) / 8
    except ValueError as error:
        raise SimulationError(f"--net {text}: {error}") from error
    found = [match for delay in delays if (match := _DELAY.fullmatch(delay))]
    if len(found) != len(delays) or not 1 <= len(found) <= 2:
        raise SimulationError(
            "--net must be RATE:LATENCY or RATE:LATENCY:OVERHEAD, like 10gbit:50us or "
            f"10gbit:50us:4us, got {text!r}"
        )
    latency, *overhead = (float(match[1]) * _UNITS[match[2]] for match in found)
    return Network(latency, bandwidth, *overhead)
