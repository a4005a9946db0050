"""From the turns of all ranks to one record per contender."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .names import BACKWARD, DDP, LINK, MEMORY, limited, ours
from .plan import Plan
from .turns import Turn

Record = dict[str, Any]
METERED, MODELLED, INTERFACE = "metered", "modelled", "interface"


def records(plan: Plan, params: int, of_ranks: Sequence[Mapping[str, Sequence[Turn]]]) -> list[Record]:
    """A step takes as long as on its slowest rank; all else is the mean over the ranks, and then the median over
    the steps. Bytes and stages, which add up, are means."""
    found = [record_of(plan, params, name, [turns[name] for turns in of_ranks]) for name in plan.names]
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
    """The median of a reference over the groups in which the two took turns: the machine may have been another one
    in the others."""
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
    """Whether its steps have no backward."""
    return name == MEMORY or limited(name) is not None


def record_of(plan: Plan, params: int, name: str, ranks: Sequence[Sequence[Turn]]) -> Record:
    """Of one contender, by the turns of all ranks."""
    slowest = [max(turn.seconds for turn in step) for step in zip(*ranks, strict=True)]
    interface = _mean(ranks, lambda turn: turn.interface_bytes)
    sent, source = _sent(ranks, None if interface is None else interface / plan.ranks_per_host)
    return {
        "name": name,
        "link": plan.link,
        "ranks": plan.ranks,
        "ranks_per_host": plan.ranks_per_host,
        "model": plan.model,
        "params": params,
        "density": plan.density,
        "values": _values(plan, name),
        "steps": len(slowest),
        "median_step_seconds": statistics.median(slowest),
        "best_step_seconds": min(slowest),
        "cpu_seconds": _typical(ranks, lambda turn: turn.cpu_seconds),
        "sent_bytes": sent,
        "sent_bytes_source": source,
        "modelled_bytes": _mean(ranks, lambda turn: turn.reduced.modelled_bytes),
        "interface_bytes": interface,
        "backward_seconds": _typical(ranks, lambda turn: turn.reduced.backward),
        "exposed_seconds": _typical(ranks, lambda turn: turn.reduced.exposed),
        "hidden_share": _typical(ranks, lambda turn: turn.reduced.hidden_share),
        "stage_seconds": _stages(ranks),
        "step_seconds": slowest,
    }


def _values(plan: Plan, name: str) -> str | None:
    """On the wire; None for those who do not encode."""
    own = ours(name, plan.values)
    return None if own is None else own.values


def _sent(ranks: Sequence[Sequence[Turn]], share: float | None) -> tuple[float | None, str | None]:
    """Bytes per rank and step, and who says so of most of them. `share` is a rank's, of what left its host."""
    metered = _mean(ranks, lambda turn: turn.reduced.sent_bytes)
    if metered is None:
        return share, None if share is None else INTERFACE
    modelled = _mean(ranks, lambda turn: turn.reduced.modelled_bytes) or 0.0
    return metered, MODELLED if modelled > metered / 2 else METERED


def _stages(ranks: Sequence[Sequence[Turn]]) -> dict[str, float] | None:
    told = [turn.reduced.stages for rank in ranks for turn in rank if turn.reduced.stages is not None]
    return {stage: statistics.fmean(one[stage] for one in told) for stage in told[0]} if told else None


def _mean(ranks: Sequence[Sequence[Turn]], figure: Callable[[Turn], float | None]) -> float | None:
    known = [value for rank in ranks for turn in rank if (value := figure(turn)) is not None]
    return statistics.fmean(known) if known else None


def _typical(ranks: Sequence[Sequence[Turn]], figure: Callable[[Turn], float | None]) -> float | None:
    means = [_mean([step], figure) for step in zip(*ranks, strict=True)]
    known = [mean for mean in means if mean is not None]
    return statistics.median(known) if known else None
