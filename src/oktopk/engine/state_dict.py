"""What a rank keeps of a run, as tensors and primitives; and how a changed number of ranks shares it anew."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..feedback.buckets import Bucket
from .bucket_state import BucketState
from .step import StepReducer

_log = logging.getLogger(__name__)

FORMAT = 1
_MEMORIES = ("residuals", "velocities")


def save_state(steps: StepReducer) -> dict[str, Any]:
    algorithm = steps.settings.algorithm
    return {
        "format": FORMAT,
        "rank": steps.meter.rank,
        "world": steps.meter.world,
        "ranks_per_host": steps.settings.ranks_per_host,
        "step": steps.step,
        "skipped_steps": steps.skipped_steps,
        "skipped_in_a_row": steps.skipped_in_a_row,
        "algorithm": repr(algorithm),
        "residuals": steps.reducer.residuals.state_dict(),
        "velocities": steps.reducer.velocities.state_dict(),
        "buckets": [
            {
                "names": list(lane.bucket.names),
                "sizes": list(lane.bucket.sizes),
                "tracking": algorithm.pack_state(lane.tracking),
                "goes_dense": lane.choice.dense,
                "seconds": list(lane.choice.typical() if steps.settings.auto else lane.choice.agreed),
            }
            for lane in sorted(steps.lanes.values(), key=lambda lane: lane.index)
        ],
    }


def load_state(steps: StepReducer, saved: Mapping[str, Any]) -> None:
    """Take over what was saved. Nothing is changed if it does not fit."""
    with _as_state_dict():
        _check(steps, saved)
        lanes = _lanes(steps, saved)
        counters = {name: int(saved[name]) for name in ("step", "skipped_steps", "skipped_in_a_row")}
        residuals, velocities = (_memory(saved, name) if steps.exchanges else {} for name in _MEMORIES)
    for name, value in counters.items():
        setattr(steps, name, value)
    steps.reducer.residuals.load_state_dict(residuals)
    steps.reducer.velocities.load_state_dict(velocities)
    steps.lanes = lanes


def _memory(saved: Mapping[str, Any], memory: str) -> dict[str, Tensor]:
    parts = dict(saved[memory])
    for name, part in parts.items():
        if part.layout is not torch.strided:
            raise ValueError(f"the {memory} of {name} are no dense tensor")
    return parts


def _lanes(steps: StepReducer, saved: Mapping[str, Any]) -> dict[Bucket, BucketState]:
    algorithm = steps.settings.algorithm
    known = saved["algorithm"] == repr(algorithm)
    if not known:
        _log.warning("the checkpoint is of %s: its residuals are kept, its thresholds are not", saved["algorithm"])
    lanes = {}
    for index, (bucket, entry) in enumerate(zip(saved_layout(saved), saved["buckets"], strict=True)):
        place = index - len(saved["buckets"])  # in order, but none that counts: ranks agree on it first
        lane = BucketState(bucket, place, torch.empty(0, dtype=torch.int64))
        lane.tracking = algorithm.unpack_state(entry["tracking"]) if known else None
        dense, sparse = entry["seconds"]
        lane.choice.dense, lane.choice.agreed = bool(entry["goes_dense"]), (float(dense), float(sparse))
        lanes[bucket] = lane
    return lanes


def saved_layout(saved: Mapping[str, Any]) -> tuple[Bucket, ...]:
    """The buckets that a state_dict was taken with, in their order."""
    with _as_state_dict():
        return tuple(Bucket(tuple(entry["names"]), tuple(entry["sizes"])) for entry in saved["buckets"])


@contextmanager
def _as_state_dict() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a state_dict of oktopk: {error!r}") from error


def _check(steps: StepReducer, saved: Mapping[str, Any]) -> None:
    if saved["format"] != FORMAT:
        raise ValueError(f"the state has format {saved['format']!r}, this version of oktopk reads {FORMAT}")
    rank, world = steps.meter.rank, steps.meter.world
    if saved["world"] != world:
        raise ValueError(
            f"the state was saved by {saved['world']} ranks, now there are {world}: read the states of all of "
            "them and load oktopk.redistribute(states, rank, world)"
        )
    per_host = saved.get("ranks_per_host", 1)  # None after redistribute()
    if per_host not in (steps.settings.ranks_per_host, None):
        raise ValueError(
            f"the state was saved with ranks_per_host={per_host}, now it is {steps.settings.ranks_per_host}: read "
            "the states of all ranks and load oktopk.redistribute(states, rank, world)"
        )
    if saved["rank"] != rank:
        raise ValueError(
            f"this is the state of rank {saved['rank']}, loaded on rank {rank}: residuals differ, so every rank "
            "must save and load its own"
        )


def redistribute(states: Iterable[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """The state of one of `world` ranks, made from those of all ranks of an earlier run, in any order.

    Each rank gets the mean of the old residuals, so that the sum over ranks, divided by their number, is what
    it was: Σe'/P' = Σe/P; with ranks_per_host, over the leaders and by their number. States are taken one at a
    time: hand over a generator that reads file after file.
    """
    first: dict[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {name: {} for name in _MEMORIES}
    seen: set[int] = set()
    for state in states:
        first = first or dict(state)
        if (state["world"], state["step"]) != (first["world"], first["step"]):
            raise ValueError(
                f"the states are not of one run: rank {state['rank']} of {state['world']} at step "
                f"{state['step']}, rank {first['rank']} of {first['world']} at step {first['step']}"
            )
        if state["rank"] in seen:
            raise ValueError(f"redistribute got the state of rank {state['rank']} twice")
        if saved_layout(state) != saved_layout(first):
            raise ValueError(f"the states are not of one run: rank {state['rank']} has other buckets")
        seen.add(state["rank"])
        for memory in _MEMORIES:
            for name, part in state[memory].items():
                total = sums[memory].setdefault(name, torch.zeros(part.shape, dtype=torch.float64))
                total += part
    if first is None or seen != set(range(first["world"])):
        expected = "all ranks" if first is None else f"all {first['world']} ranks"
        raise ValueError(f"redistribute needs the states of {expected}, got those of {sorted(seen)}")
    holders = first["world"] // (first.get("ranks_per_host") or 1)
    shared = {
        memory: {name: (total / holders).float() for name, total in parts.items()}
        for memory, parts in sums.items()
    }
    return {
        **first,
        **shared,
        "rank": rank,
        "world": world,
        "ranks_per_host": None,
        "buckets": [{**entry, "tracking": None} for entry in first["buckets"]],
    }
