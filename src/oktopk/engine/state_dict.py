"""What a rank keeps of a run, as tensors and primitives; and how another number of ranks shares it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..algorithms.selection import is_count
from ..feedback.buckets import MISMATCH, Bucket
from ..wire.sparse_vector import all_finite
from .autotune import read_decision
from .bucket_state import BucketGroup, BucketState
from .settings import GRADIENTS, check_pairs
from .step import StepReducer

_log = logging.getLogger(__name__)

FORMAT = 2
_MEMORIES = ("residuals", "velocities")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")


def save_state(steps: StepReducer) -> dict[str, Any]:
    algorithm = steps.settings.algorithm
    buckets = sorted(steps.buckets.states.values(), key=lambda state: state.index)
    places = {state.bucket: place for place, state in enumerate(buckets)}
    return {
        "format": FORMAT,
        "rank": steps.meter.rank,
        "world": steps.meter.world,
        "ranks_per_host": steps.settings.ranks_per_host,
        "averages": steps.averages,
        **dict(zip(_COUNTERS, (steps.step, steps.skips.total, steps.skips.in_a_row), strict=True)),
        "algorithm": repr(algorithm),
        "residuals": steps.reducer.residuals.state_dict(),
        "velocities": steps.reducer.velocities.state_dict(),
        "buckets": [{"names": list(state.bucket.names), "sizes": list(state.bucket.sizes)} for state in buckets],
        "groups": [
            {
                "buckets": [places[state.bucket] for state in group.members],
                "tracking": algorithm.pack_state(group.tracking),
            }
            for group in steps.buckets.groups.values()
            if group.tracking is not None and all(state.bucket in places for state in group.members)
        ],
        "autotune": steps.autotune.state_dict(),
        "schedule": [list(pair) for pair in steps.schedule],
    }


def read_state(
    steps: StepReducer, saved: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> Callable[[], None]:
    """Check all that was saved, against the parameters' `sizes` if they are known, and change nothing.

    Returns a function that takes it over and cannot fail.
    """
    with _reading_state_dict():
        _check(steps, saved)
        layout = saved_layout(saved)
        # In order, but none that counts: ranks agree on the place of a bucket before they use it.
        states = [
            BucketState(bucket, place - len(layout), torch.empty(0, dtype=torch.int64))
            for place, bucket in enumerate(layout)
        ]
        groups = _groups(steps, saved, states)
        counters = {name: saved[name] for name in _COUNTERS}
        for name, value in counters.items():
            if not is_count(value):
                raise ValueError(f"{MISMATCH}: {name} must be an integer from 0, got {value!r}")
        known = _sizes_in(layout) if sizes is None else sizes
        residuals, velocities = (_memory(saved, name, known) if steps.exchanges else {} for name in _MEMORIES)
        autotune = dict(saved["autotune"])
        read_decision(autotune)
        taken = saved.get("schedule") or []
        schedule = list(check_pairs(taken)) if taken else []

    def apply() -> None:
        steps.step, steps.skips.total, steps.skips.in_a_row = counters.values()
        steps.reducer.residuals.load_state_dict(residuals)
        steps.reducer.velocities.load_state_dict(velocities)
        steps.buckets.states, steps.buckets.groups = {state.bucket: state for state in states}, groups
        steps.autotune.load_state_dict(autotune)
        steps.schedule = schedule

    return apply


def _groups(steps: StepReducer, saved: Mapping[str, Any], states: list[BucketState]) -> dict[Bucket, BucketGroup]:
    """The groups that buckets were fused in, with what the algorithm remembers of each."""
    algorithm = steps.settings.algorithm
    if saved["algorithm"] != repr(algorithm):
        _log.warning("the checkpoint is of %s: its residuals are kept, its thresholds are not", saved["algorithm"])
        return {}
    groups: dict[Bucket, BucketGroup] = {}
    grouped = [place for entry in saved["groups"] for place in entry["buckets"]]
    if not all(is_count(place) and place < len(states) for place in grouped) or len({*grouped}) < len(grouped):
        raise ValueError(f"{MISMATCH}: its groups name the buckets {grouped} of {len(states)}")
    for entry in saved["groups"]:
        if not entry["buckets"]:
            raise ValueError(f"{MISMATCH}: it has a group without buckets")
        group = BucketGroup(
            tuple(states[place] for place in entry["buckets"]), algorithm.unpack_state(entry["tracking"])
        )
        problem = group.tracking is not None and algorithm.state_problem(group.tracking, group.size)
        if problem:
            raise ValueError(f"{MISMATCH}: {problem}")
        groups[group.members[0].bucket] = group
    return groups


def _sizes_in(layout: Iterable[Bucket]) -> dict[str, int]:
    return {name: size for bucket in layout for name, size in zip(bucket.names, bucket.sizes, strict=True)}


def _memory(saved: Mapping[str, Any], memory: str, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The residuals or velocities by parameter: dense, finite in float32, and of the parameters' sizes."""
    parts: dict[str, Tensor] = {}
    for name, part in dict(saved[memory]).items():
        what = f"{MISMATCH}: the {memory} of {name}"
        if not isinstance(name, str):
            raise ValueError(f"{MISMATCH}: the {memory} have the name {name!r}")
        if not isinstance(part, Tensor) or part.layout is not torch.strided or part.dtype not in _DTYPES:
            raise ValueError(f"{what} are not a dense floating-point tensor of 16 bits or more")
        if part.is_meta:
            raise ValueError(f"{what} have no data: they are on the meta device")
        if part.numel() != sizes.get(name, part.numel()):
            raise ValueError(f"{what} have {part.numel()} entries, the parameter {sizes[name]}")
        parts[name] = part.detach().to(torch.float32)
        if not all_finite(parts[name]):
            raise ValueError(f"{what} are not finite")
    return parts


def saved_layout(saved: Mapping[str, Any]) -> tuple[Bucket, ...]:
    """The buckets that a state_dict was taken with, in their order."""
    with _reading_state_dict():
        layout = tuple(Bucket(tuple(entry["names"]), tuple(entry["sizes"])) for entry in saved["buckets"])
    names = [name for bucket in layout for name in bucket.names]
    for bucket in layout:
        if not bucket.names or len(bucket.names) != len(bucket.sizes) or not all(map(is_count, bucket.sizes)):
            raise ValueError(f"{MISMATCH}: a bucket of {bucket.names} with sizes {bucket.sizes}")
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ValueError(f"{MISMATCH}: its buckets must name every parameter once")
    return layout


@contextmanager
def _reading_state_dict() -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"this is not a state_dict of oktopk: {error!r}") from error


def _check_format(saved: Mapping[str, Any]) -> None:
    if saved["format"] == 1:
        raise ValueError(
            "the state was saved by oktopk 0.1, which this version cannot read: load only the model and the "
            "optimizer, and let residuals start at zero"
        )
    if saved["format"] != FORMAT:
        raise ValueError(f"the state has format {saved['format']!r}, this version of oktopk reads {FORMAT}")


def _check(steps: StepReducer, saved: Mapping[str, Any]) -> None:
    _check_format(saved)
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
    if (averages := saved.get("averages", GRADIENTS)) != steps.averages:
        raise ValueError(
            f"the residuals of this state are {averages}, this run averages {steps.averages}: load only the model "
            "and the optimizer, and let residuals start at zero"
        )
    if saved["rank"] != rank:
        raise ValueError(
            f"this is the state of rank {saved['rank']}, loaded on rank {rank}: residuals differ, so every rank "
            "must save and load its own"
        )


def redistribute_residuals(states: Iterable[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """The state of one of `world` ranks, made from those of all ranks of an earlier run: oktopk.redistribute().

    Each rank gets the mean of the old residuals, so that the sum over ranks, divided by their number, is what
    it was: Σe'/P' = Σe/P; with ranks_per_host, over the leaders and by their number.
    """
    if not (is_count(rank) and is_count(world) and rank < world):
        raise ValueError(f"rank must be one of 0 to world - 1, got rank {rank!r} of {world!r}")
    first: dict[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {name: {} for name in _MEMORIES}
    seen: set[int] = set()
    for state in states:
        first = first or dict(state)
        with _reading_state_dict():
            _check_one_run(state, first, seen)
            sizes = _sizes_in(saved_layout(state))
            for memory in _MEMORIES:
                for name, part in _memory(state, memory, sizes).items():
                    total = sums[memory].setdefault(name, torch.zeros(part.shape, dtype=torch.float64))
                    if total.shape != part.shape:
                        raise ValueError(f"the states are not of one run: other shapes of the {memory} of {name}")
                    total += part.cpu()  # a state that was saved on a GPU may be there
        seen.add(state["rank"])
    if first is None or len(seen) != first["world"] or max(seen) >= len(seen):
        expected = "all ranks" if first is None else f"all {first['world']} ranks"
        raise ValueError(f"redistribute needs the states of {expected}, got those of {sorted(seen)}")
    per_host = first.get("ranks_per_host") or 1
    if not is_count(per_host) or first["world"] % per_host:
        raise ValueError(f"{MISMATCH}: ranks_per_host={per_host!r} of {first['world']} ranks")
    holders = first["world"] // per_host
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
        "groups": [],
    }


def _check_one_run(state: Mapping[str, Any], first: Mapping[str, Any], seen: Collection[int]) -> None:
    """Check that a state is of the same run as the first one, and of another rank than those that were seen."""
    _check_format(state)
    numbers = {name: state[name] for name in ("rank", "world", "step")}
    if not all(map(is_count, numbers.values())):
        raise ValueError(f"this is not a state_dict of oktopk: {numbers} must be integers from 0")
    if (state["world"], state["step"]) != (first["world"], first["step"]):
        raise ValueError(
            f"the states are not of one run: rank {state['rank']} of {state['world']} at step "
            f"{state['step']}, rank {first['rank']} of {first['world']} at step {first['step']}"
        )
    if state["rank"] in seen:
        raise ValueError(f"redistribute got the state of rank {state['rank']} twice")
    if saved_layout(state) != saved_layout(first):
        raise ValueError(f"the states are not of one run: rank {state['rank']} has other buckets")
