"""The network of the model: what a message costs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oktopk.errors import OkTopkError
from oktopk.tools.lab import parse_rate

_LATENCY = re.compile(r"(\d+(?:\.\d+)?)(us|µs|ms|s)")
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class SimulationError(OkTopkError, ValueError):
    """Something that cannot be simulated."""


@dataclass(frozen=True)
class Network:
    """A full-duplex link for each rank, and a switch between them that is never the bottleneck.

    A message leaves its sender in bytes / bandwidth seconds, after those that were there before it. Its first byte
    is at the receiver's link `latency` later, and it takes its turn there in the same way.
    """

    latency: float
    """α, seconds."""
    bandwidth: float
    """β, bytes per second and direction."""

    def __str__(self) -> str:
        return f"{self.bandwidth * 8e-9:.4g} Gbit/s, {self.latency * 1e6:.4g} µs"


def parse_network(text: str) -> Network:
    """
    >>> print(parse_network("10gbit:50us"))
    10 Gbit/s, 50 µs
    """
    rate, mark, delay = text.partition(":")
    match = _LATENCY.fullmatch(delay)
    try:
        bandwidth = parse_rate(rate) / 8
    except ValueError as error:
        raise SimulationError(f"--net {text}: {error}") from error
    if not mark or match is None:
        raise SimulationError(f"--net must be a rate and a latency, like 10gbit:50us, got {text!r}")
    return Network(float(match[1]) * _UNITS[match[2]], bandwidth)
