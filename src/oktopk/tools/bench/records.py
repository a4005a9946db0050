"""Combine the timed steps of all ranks into one record per contender."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oktopk.tools.hooks import DDP

from .names import BACKWARD, LINK, MEMORY, link_limit_target, parse_contender
from .plan import Plan
from .steps import TimedStep

Record = dict[str, Any]
METERED, MODELLED, INTERFACE = "metered", "modelled", "interface"


def make_records(plan: Plan, params: int, of_ranks: Sequence[Mapping[str, Sequence[TimedStep]]]) -> list[Record]:
    """Make one record per contender.

    A step takes as long as on its slowest rank; everything else is the mean over ranks, then the median over
    steps. Bytes and stages, which must add up, are means.
    """
    found = [
        make_record(plan, params, name, [steps_of_rank[name] for steps_of_rank in of_ranks]) for name in plan.names
    ]
    steps = {record["name"]: record["step_seconds"] for record in found}
    for record in found:
        name, own = record["name"], record["median_step_seconds"]
        ddp, backward, memory = (_beside(plan, name, reference, steps) for reference in (DDP, BACKWARD, MEMORY))
        link = _beside(plan, name, f"{LINK}:{name}", steps)
        if is_limit(name):
            ddp = backward = None
        record["ddp_over_it"] = None if ddp is None else ddp / own
        record["above_backward_seconds"] = above = None if backward is None else own - backward
        record["limits_seconds"] = limits = None if memory is None or link is None else memory + link
        record["above_over_limits"] = above / limits if above is not None and limits else None
    return found


def _beside(plan: Plan, name: str, reference: str, steps: Mapping[str, Sequence[float]]) -> float | None:
    """Median of a reference over the groups it shares with this contender: the machine's speed may change between
    groups."""
    groups = [group for group in plan.groups if reference in group]
    each = len(steps[reference]) // len(groups) if groups else 0
    shared = [
        seconds
        for place, group in enumerate(groups)
        if name in group
        for seconds in steps[reference][place * each : (place + 1) * each]
    ]
    return statistics.median(shared) if shared else None


def is_limit(name: str) -> bool:
    """Whether it is a lower limit, without backward."""
    return name == MEMORY or link_limit_target(name) is not None


def make_record(plan: Plan, params: int, name: str, ranks: Sequence[Sequence[TimedStep]]) -> Record:
    """Make the record of one contender from the steps of all ranks."""
    slowest = [max(timed.seconds for timed in step) for step in zip(*ranks, strict=True)]
    interface = _mean(ranks, lambda timed: timed.interface_bytes)
    sent, source = _sent(ranks, None if interface is None else interface / plan.ranks_per_host)
    return {
        "name": name,
        "link": plan.link,
        "ranks": plan.ranks,
        "ranks_per_host": plan.ranks_per_host,
        "model": plan.model,
        "params": params,
        "density": _density(plan, name),
        "values": _values(plan, name),
        "steps": len(slowest),
        "median_step_seconds": statistics.median(slowest),
        "best_step_seconds": min(slowest),
        "cpu_seconds": _typical(ranks, lambda timed: timed.cpu_seconds),
        "sent_bytes": sent,
        "sent_bytes_source": source,
        "modelled_bytes": _mean(ranks, lambda timed: timed.reduced.modelled_bytes),
        "interface_bytes": interface,
        "backward_seconds": _typical(ranks, lambda timed: timed.reduced.backward),
        "exposed_seconds": _typical(ranks, lambda timed: timed.reduced.exposed),
        "hidden_share": _typical(ranks, lambda timed: timed.reduced.hidden_share),
        "stage_seconds": _stages(ranks),
        "step_seconds": slowest,
    }


def _values(plan: Plan, name: str) -> str | None:
    """Value format on the wire; None for PyTorch's own averaging."""
    own = parse_contender(name, plan.values)
    return None if own is None else own.values


def _density(plan: Plan, name: str) -> float | str:
    """The density that was asked for: its own, or that of the measurement."""
    own = parse_contender(name)
    density: float | str = plan.density if own is None else own.options.get("density", plan.density)
    return density


def _sent(ranks: Sequence[Sequence[TimedStep]], share: float | None) -> tuple[float | None, str | None]:
    """Bytes per rank and step, and the source of most of them. `share` is a rank's share of its host's traffic."""
    metered = _mean(ranks, lambda timed: timed.reduced.sent_bytes)
    if metered is None:
        return share, None if share is None else INTERFACE
    modelled = _mean(ranks, lambda timed: timed.reduced.modelled_bytes) or 0.0
    return metered, MODELLED if modelled > metered / 2 else METERED


def _stages(ranks: Sequence[Sequence[TimedStep]]) -> dict[str, float] | None:
    known = [timed.reduced.stages for rank in ranks for timed in rank if timed.reduced.stages is not None]
    return {stage: statistics.fmean(one[stage] for one in known) for stage in known[0]} if known else None


def _mean(ranks: Sequence[Sequence[TimedStep]], figure: Callable[[TimedStep], float | None]) -> float | None:
    known = [value for rank in ranks for timed in rank if (value := figure(timed)) is not None]
    return statistics.fmean(known) if known else None


def _typical(ranks: Sequence[Sequence[TimedStep]], figure: Callable[[TimedStep], float | None]) -> float | None:
    means = [_mean([step], figure) for step in zip(*ranks, strict=True)]
    known = [mean for mean in means if mean is not None]
    return statistics.median(known) if known else None
