"""Predict whole steps of the model: what each way to average adds at a link, and below which rate it wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.engine.settings import Settings
from oktopk.tools.crossover import Cost, crossover_figures, overlapped_cost
from oktopk.tools.model_step import ModelStep

from .findings import Request
from .step_times import DENSE


def predict_steps(
    request: Request, step: ModelStep | None, ways: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Predict the step of every way at the link: the measured one, or the one that was asked for.

    Args:
        request: what the user asks for.
        step: the model's step without communication; None if it is not known: only the exchange counts then.
        ways: what time_steps found, dense first.
        links: what measure_links found; the slowest link counts.

    Returns:
        `rate`, `measured_rate` (what lies above it is not supported by a measurement), and for each way
        `adds_seconds` at `rate`, and its crossover with dense.
    """
    slowest = 8 * min(link["bytes_per_second"] for link in links)
    rate = slowest if request.link is None else request.link
    compute = step.seconds if step else 0.0
    costs = [_cost(request, step, way, slowest) for way in ways]
    return {
        "rate": rate,
        "measured_rate": slowest,
        "step_seconds": step and step.seconds,
        "ways": [
            {"algorithm": way["algorithm"], "values": way["values"], "adds_seconds": cost.at(rate) - compute}
            | ({} if way["algorithm"] == DENSE else crossover_figures(costs[0], cost))
            for way, cost in zip(ways, costs, strict=True)
        ],
    }


def _cost(request: Request, step: ModelStep | None, way: Mapping[str, Any], rate: float) -> Cost:
    """The cost of a step at any rate, from an exchange that was measured at one rate."""
    assert request.params is not None
    compute, backward = (step.seconds, step.backward) if step else (0.0, 0.0)
    unlimited = max(0.0, way["seconds"] - 8 * way["sent_bytes"] / rate)
    dense = way["algorithm"] == DENSE
    density, fusion = (1.0, 0) if dense else (request.density, Settings.fusion_entries)
    return overlapped_cost(
        compute, backward, unlimited, way["sent_bytes"], request.params, density=density, fusion_entries=fusion
    )
