"""Random cases, each known by one number: how many ranks do what, and which fault happens to which of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import oktopk
from oktopk.wire.message import VALUE_CODES
from stress.chaos.faults import EVERYBODY, MESSAGE_FAULTS, RANK_FAULTS, SLEEPS, Fault, Moment
from tests.support import stepping

FAULTS_PER_JOB = 4
"""So many cases in a row do the same with different faults: then it is known what comes of it without."""
AUTO_DECIDES = 11
"""The step at whose end `auto` chooses, by the clock, what it goes on with."""
IMPATIENT, PATIENT = 0.5, 30.0
"""Seconds of timeout: where a rank may be missed for good, and where a busy machine must not make one missed."""


@dataclass(frozen=True)
class Job:
    """What the ranks do."""

    world: int
    algorithm: str
    front_end: str
    steps: int
    density: float
    values: str
    buckets: Any = "model"
    warmup_steps: int = 0
    fusion_entries: int = 0
    dense: tuple[str, ...] = ()
    auto: bool = False
    ranks_per_host: int = 1
    spoilt_step: int | None = None
    """A step in which rank 1 has a gradient that is not finite."""

    def options(self) -> dict[str, Any]:
        names = (
            "density",
            "values",
            "buckets",
            "warmup_steps",
            "fusion_entries",
            "dense",
            "auto",
            "ranks_per_host",
        )
        return {name: getattr(self, name) for name in names}


def job_of(number: int) -> Job:
    """What is done in the case of that number."""
    chance = random.Random(f"job {number // FAULTS_PER_JOB}")
    auto = chance.random() < 0.1
    steps = AUTO_DECIDES + 2 if auto else 4
    job = Job(
        world=chance.choice((2, 3)) if auto else chance.choice((2, 2, 3, 3, 4, 5, 6, 7, 8)),
        algorithm=chance.choice([*oktopk.ALGORITHMS, *3 * ["oktopk"]]),
        front_end="reducer" if auto else chance.choice(("reducer", "reducer", "collective")),
        steps=steps,
        density=chance.choice((0.01, 0.05, 0.3, 1.0)),
        values=chance.choice(list(VALUE_CODES)),
        buckets=chance.choice(("model", stepping.SEVERAL)),
        warmup_steps=chance.choice((0, 0, 1, 2)),
        fusion_entries=chance.choice((0, 0, 8, 1000)),
        dense=chance.choice(((), (), ("b",))),
        auto=auto,
        spoilt_step=chance.randrange(steps) if chance.random() < 0.15 else None,
    )
    hosts = job.front_end == "reducer" and chance.random() < 0.25
    ranks = [ranks for ranks in range(2, job.world + 1) if job.world % ranks == 0]
    return replace(job, ranks_per_host=chance.choice(ranks)) if hosts else job


def fault_of(number: int, moments: Sequence[Sequence[Moment]]) -> Fault:
    """What goes wrong in the case of that number, at one of the moments that the ranks have."""
    chance = random.Random(f"fault {number}")
    kind = chance.choice(MESSAGE_FAULTS + RANK_FAULTS)
    wanted = of_a_message if kind in MESSAGE_FAULTS else any_moment
    return Fault(kind, *place(moments, chance, wanted), duration(kind, chance), chance.randrange(2**32))


def of_a_message(moment: Moment) -> bool:
    return moment.peer != EVERYBODY


def of_a_sum(moment: Moment) -> bool:
    return moment.peer == EVERYBODY


def any_moment(moment: Moment) -> bool:
    return True


def place(
    moments: Sequence[Sequence[Moment]], chance: random.Random, wanted: Callable[[Moment], bool]
) -> tuple[int, Moment]:
    """A rank and a moment: each step, phase and rank as likely as the other, however many messages it has."""
    possible = [(rank, moment) for rank, its in enumerate(moments) for moment in its if wanted(moment)]
    step = chance.choice(sorted({moment.step for _, moment in possible}))
    possible = [one for one in possible if one[1].step == step]
    phase = chance.choice(sorted({moment.phase for _, moment in possible}))
    possible = [one for one in possible if one[1].phase == phase]
    victim = chance.choice(sorted({rank for rank, _ in possible}))
    return chance.choice([one for one in possible if one[0] == victim])


def duration(kind: str, chance: random.Random) -> float:
    """Some pauses are longer than the timeout."""
    if kind == "slow":
        return chance.choice((0.0005, 0.002))
    short = (0.005, 0.02, 0.1)
    return chance.choice((*short, 3 * IMPATIENT) if kind == "pause" else short) if kind in SLEEPS else 0.0


def harmless(fault: Fault) -> bool:
    """Whether everybody must go on as if nothing had happened."""
    return fault.kind in SLEEPS and fault.seconds < IMPATIENT
