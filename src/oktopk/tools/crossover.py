"""Where two ways to average gradients take the same time: measured between known points, or predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

_FIRST_BUCKET, _BUCKET = 1 << 18, 25 << 18
"""Parameters of DDP's buckets: 1 MiB for the first that backward completes, 25 MiB for the others."""
AT_NO_RATE = "at no rate"
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
        last_bytes: Bytes that wait for the end of backward, so that nothing hides them; of all steps together.
    """

    seconds: float
    sent_bytes: float
    hidden_seconds: float = 0.0
    last_bytes: float = 0.0

    def at(self, rate: float) -> float:
        """Seconds at a rate in bits per second."""
        on_link, last = 8 * self.sent_bytes / rate, 8 * self.last_bytes / rate
        return self.seconds + max(last, on_link - self.hidden_seconds)


def predict_crossover(dense: Cost, sparse: Cost) -> float | None:
    """Predict B*, the rate in bits per second below which the sparse way reaches the target first.

    The model: every rank has a full-duplex link of rate B, and a step takes

        compute + max(8 · last bytes / B, 8 · bytes / B - hidden)

    where compute is the step at an unlimited rate (with the latency of its rounds), bytes is what a rank sends,
    hidden is the time on the link that backward covers, and last bytes wait for its end. Each way needs its own
    number of steps to the target, so that costs are totals over these steps. Without overlap

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


def overlapped_cost(
    compute: float,
    backward: float,
    exchange: float,
    sent_bytes: float,
    parameters: int,
    density: float = 1.0,
    fusion_entries: int = 0,
) -> Cost:
    """The cost of one step of a model whose gradients are averaged while backward runs, in DDP's buckets.

    The link is busy from the moment when backward has completed the first group of buckets that share messages;
    the last group waits for its end. Parameters are assumed to be spread evenly over backward.

    Args:
        compute: seconds of the step without communication: forward, backward, optimizer.
        backward: seconds of these in backward.
        exchange: seconds of the exchange at an unlimited rate; not hidden, because it uses the same cores.
        sent_bytes: bytes that a rank sends.
        parameters: of the model.
        density: the share of entries that is sent.
        fusion_entries: selected entries up to which buckets share messages.
    """
    groups = list(_groups(parameters, density, fusion_entries))
    hidden = backward * (1 - groups[0] / parameters)
    return Cost(compute + exchange, sent_bytes, hidden, sent_bytes * groups[-1] / parameters)


def _groups(parameters: int, density: float, fusion_entries: int) -> Iterator[int]:
    """Parameters of each group of buckets that share messages, in the order of backward."""
    left, bucket, group = parameters, _FIRST_BUCKET, 0
    while left:
        taken = min(bucket, left)
        left, group, bucket = left - taken, group + taken, _BUCKET
        if density * group >= fusion_entries or not left:
            yield group
            group = 0


def format_rate(rate: float | None) -> str:
    """
    >>> format_rate(1.5e9), format_rate(2.04e7), format_rate(None)
    ('1.5 Gbit/s', '20.4 Mbit/s', '–')
    """
    if rate is None:
        return "–"
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def crossover_figures(dense: Cost, sparse: Cost) -> dict[str, float | str | None]:
    """What predict_crossover finds, for JSON: `crossover` is a rate or None, `faster` says where sparse wins."""
    rate = predict_crossover(dense, sparse)
    if rate is None:
        return {"crossover": None, "faster": AT_NO_RATE}
    if math.isinf(rate):
        return {"crossover": None, "faster": "at any rate"}
    return {"crossover": rate, "faster": f"below {format_rate(rate)}"}
