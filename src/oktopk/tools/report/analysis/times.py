"""Split the time of a step into stages, hidden and exposed.

Reductions run on a worker thread. Work during backward is hidden and does not add to the step. Work after the last
bucket was submitted is exposed and part of the step. If a bucket was reduced partly before and partly after that
point, each of its stages is exposed in the same proportion.

    main     data | forward | backward ......... | waits for the worker ..... | loss round | update
    worker                 bucket 0 | bucket 1 ..|.. bucket 1 | bucket 2
                           hidden                 exposed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .runs import Reduction, Step

WORK: Mapping[str, tuple[str, ...]] = {
    "select": ("select_seconds",),
    "encode": ("encode_seconds", "decode_seconds"),
    "sums": ("other_seconds",),
    "exchange": ("exchange_seconds",),
    "wait": ("wait_seconds",),
}
"""Stages of a reduction, and their columns."""
STAGES = ("forward", "backward", *WORK, "hand_over", "rest")
"""The stages of a step."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": ("forward", "backward"),
    "compress": ("select", "encode", "sums"),
    "communicate": ("exchange", "hand_over"),
    "wait": ("wait",),
    "rest": ("rest",),
}


@dataclass(frozen=True)
class Split:
    """Seconds of one step by stage. `shown` adds up to the step; `hidden` ran in parallel."""

    shown: Mapping[str, float]
    hidden: Mapping[str, float]

    @property
    def step(self) -> float:
        return sum(self.shown.values())


def split_step(step: Step) -> Split | None:
    """Split a step; None if its time is not known, or not yet, because the reducer writes its line first."""
    if "step_seconds" not in step.train:
        return None
    train = {name: max(0.0, value) for name, value in step.train.items()}
    forward, backward = train.get("forward_seconds", 0.0), train.get("backward_seconds", 0.0)
    exposed = train.get("exposed_seconds", max(0.0, step.numbers.get("exposed_seconds", 0.0)))
    work, hidden = _reductions(step)
    known = sum(work.values())
    if known > exposed:  # the last bucket is submitted a moment before backward returns
        clipped = {name: seconds * exposed / known for name, seconds in work.items()}
        hidden = {name: hidden[name] + work[name] - clipped[name] for name in work}
        work = clipped
    hand_over = max(0.0, exposed - known)
    rest = max(0.0, train["step_seconds"] - forward - backward - exposed)
    shown = {"forward": forward, "backward": backward, **work, "hand_over": hand_over, "rest": rest}
    return Split(shown, hidden)


def _reductions(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed and hidden seconds of each stage."""
    exposed, hidden = dict.fromkeys(WORK, 0.0), dict.fromkeys(WORK, 0.0)
    end = step.numbers.get("handed_over_seconds")
    parts: Iterable[tuple[Mapping[str, float], float]] = (
        [(part.numbers, _exposed_share(part, end)) for part in step.reductions]
        if step.reductions and end is not None
        else [(step.numbers, 1 - min(1.0, max(0.0, step.numbers.get("hidden_share", 0.0))))]
    )
    for numbers, share in parts:
        for stage, columns in WORK.items():
            seconds = sum(max(0.0, numbers.get(column, 0.0)) for column in columns)
            exposed[stage] += share * seconds
            hidden[stage] += (1 - share) * seconds
    return exposed, hidden


def _exposed_share(part: Reduction, handed_over: float) -> float:
    start, stop = part.numbers.get("start_seconds", 0.0), part.numbers.get("stop_seconds", 0.0)
    if stop <= start:
        return 1.0
    return min(1.0, max(0.0, (stop - max(start, handed_over)) / (stop - start)))


def mean(splits: Iterable[Split]) -> Split | None:
    every = list(splits)
    if not every:
        return None
    return Split(
        {stage: sum(one.shown[stage] for one in every) / len(every) for stage in STAGES},
        {stage: sum(one.hidden[stage] for one in every) / len(every) for stage in WORK},
    )
