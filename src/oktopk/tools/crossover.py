"""Where two ways to average gradients take the same time: measured between known points, or predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

_LOWEST, _HIGHEST = 1.0, 1e18
"""Rates in bits per second between which a crossover is looked for."""


def measure_crossover(
    dense: Mapping[float, float], sparse: Mapping[float, float]
) -> tuple[float, float, float] | None:
    """Find B*, the rate below which the sparse way is faster, between rates at which both were measured.

    Time grows with bytes / rate, so that it is interpolated linearly in 1 / rate.

    Args:
        dense: seconds by rate in bits per second.
        sparse: seconds at the same rates.

    Returns:
        B* and the measured rates around it; None if the faster way is the same at all rates.

    >>> measure_crossover({1e8: 1.8, 1e9: 1.08}, {1e8: 1.4, 1e9: 1.4})
    (200000000.0, 100000000.0, 1000000000.0)
    """
    for low, high in pairwise(sorted(dense)):
        gain, loss = dense[low] - sparse[low], sparse[high] - dense[high]
        if gain > 0 and loss >= 0:
            slowness = 1 / low + (1 / high - 1 / low) * gain / (gain + loss)
            return float(f"{1 / slowness:.12g}"), low, high
    return None


@dataclass(frozen=True)
class Cost:
    """What one way to average gradients costs on the way to a target, besides the rate of the link.

    Attributes:
        seconds: Time at an unlimited rate: forward, backward, selection and coding, optimizer, latency of the
            rounds; of all steps together.
        sent_bytes: Bytes that a rank sends; of all steps together.
        hidden_seconds: Time on the link that overlaps with backward and costs nothing; of all steps together.
    """

    seconds: float
    sent_bytes: float
    hidden_seconds: float = 0.0

    def at(self, rate: float) -> float:
        """Seconds at a rate in bits per second."""
        return self.seconds + max(0.0, 8 * self.sent_bytes / rate - self.hidden_seconds)


def predict_crossover(dense: Cost, sparse: Cost) -> float | None:
    """Predict B*, the rate in bits per second below which the sparse way reaches the target first.

    The model: every rank has a full-duplex link of rate B, and a step takes

        compute + max(0, 8 · bytes / B - hidden)

    where compute is the step at an unlimited rate (with the latency of its rounds), bytes is what a rank sends,
    and hidden is the time on the link that backward covers. Each way needs its own number of steps to the
    target, so that costs are totals over these steps. Without overlap

        B* = 8 · (bytes of dense - bytes of sparse) / (seconds of sparse - seconds of dense)

    Args:
        dense: the cost of the dense way to the target.
        sparse: the cost of the sparse way to the same target.

    Returns:
        The rate; infinity if the sparse way is faster at any rate, None if it is at none.

    >>> round(predict_crossover(Cost(10.0, 1e9), Cost(18.0, 1e7)) / 1e6)
    990
    """
    if sparse.at(_LOWEST) >= dense.at(_LOWEST):
        return None
    if sparse.at(_HIGHEST) <= dense.at(_HIGHEST):
        return math.inf
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if sparse.at(math.exp(middle)) < dense.at(math.exp(middle)) else (low, middle)
    return math.exp(low)
