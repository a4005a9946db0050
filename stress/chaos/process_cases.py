"""Random cases for real processes: fewer ranks, and faults that threads cannot have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import oktopk
from oktopk.wire.message import VALUE_CODES
from stress.chaos import relay
from stress.chaos.cases import FAULTS_PER_JOB, Job, any_moment, of_a_message, of_a_sum, place
from stress.chaos.faults import MESSAGE_FAULTS, Fault, Moment
from stress.chaos.relay import BYTE_FAULTS
from tests.support import stepping

IMPATIENT, PATIENT = 2.0, 40.0
WITH_CHILDREN = 15.0
"""Seconds of timeout where a rank dies whose forked children live: nobody may wait for it."""
NOTICED = 5.0
"""Seconds in which the others notice that."""
MESH, GLOO = "mesh", "gloo"
"""Whose connections go through a relay: those for messages, or those for sums."""
SIGNALS = ("stop", "stop a while", "die")
LINKS = ("link down", "link down a while")
FORKS = ("die with a child", "die with a loader")
DEATHS = ("die", *FORKS)
_EVERYWHERE = (*MESSAGE_FAULTS, "slow", "raise")
_SECONDS = {
    "delay": 0.2, "slow": 0.02, "stop a while": 1.0, "link down a while": 1.0, **dict.fromkeys(relay.HARMLESS, 0.2)
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Where the ranks run, what they use, and what can happen to them there."""

    kinds: tuple[str, ...]
    transport: str = "gloo"
    front_ends: tuple[str, ...] = ("reducer", "collective")
    relay: str | None = None


SETTINGS = {
    "tcp": Setting((*_EVERYWHERE, *SIGNALS)),
    "ddp": Setting((*_EVERYWHERE, *SIGNALS), front_ends=("ddp",)),
    "relay": Setting(BYTE_FAULTS, relay=MESH),
    "ddp relay": Setting(BYTE_FAULTS, front_ends=("ddp",), relay=MESH),
    "gloo relay": Setting(BYTE_FAULTS, front_ends=("reducer", "ddp"), relay=GLOO),
    "fork": Setting(FORKS, front_ends=("reducer", "collective", "ddp")),
    "lab": Setting((*LINKS, "die"), "lab"),
    "mpi": Setting((*_EVERYWHERE, "stop", "stop a while"), "mpi"),
}
"""A rank of an MPI job that is killed ends it: that is mpiexec's work, not ours."""
_SHARES = (
    *("tcp", "relay", "ddp", "lab", "relay", "ddp", "fork"),
    *("gloo relay", "relay", "ddp", "tcp", "ddp relay", "lab", "mpi"),
)


def setting_of(number: int, settings: Sequence[str]) -> str:
    """They take turns, as often as they have shares."""
    shares = [name for name in _SHARES if name in settings]
    return shares[number % len(shares)]


def turn_of(number: int, settings: Sequence[str]) -> int:
    """How many cases of its setting come before this one."""
    setting = setting_of(number, settings)
    return sum(setting_of(earlier, settings) == setting for earlier in range(number))


def kind_of(number: int, settings: Sequence[str]) -> str:
    """The faults of each setting take turns too: none is left out by chance."""
    kinds = SETTINGS[setting_of(number, settings)].kinds
    return kinds[turn_of(number, settings) % len(kinds)]


def job_of(number: int, settings: Sequence[str]) -> Job:
    """The same for some cases of a setting in a row.

    Sparse steps only, where threads show what comes of it without a fault: the bits of dense sums differ there.
    """
    name = setting_of(number, settings)
    chance = random.Random(f"process job {name} {turn_of(number, settings) // FAULTS_PER_JOB}")
    front_end = chance.choice(SETTINGS[name].front_ends)
    dense = front_end == "ddp" or SETTINGS[name].relay == GLOO
    return Job(
        world=chance.choice((2, 3, 3, 4)),
        algorithm=chance.choice([name for name in oktopk.ALGORITHMS if name != "dense"]),
        front_end=front_end,
        steps=4,
        density=chance.choice((0.05, 0.3)),
        values=chance.choice(list(VALUE_CODES)),
        buckets=chance.choice(("model", stepping.SEVERAL)),
        warmup_steps=chance.choice((1, 2) if SETTINGS[name].relay == GLOO else (0, 0, 1, 2)) if dense else 0,
        fusion_entries=chance.choice((0, 1000)),
    )


def fault_of(number: int, settings: Sequence[str], moments: Sequence[Sequence[Moment]]) -> Fault:
    chance, kind = random.Random(f"process fault {number}"), kind_of(number, settings)
    wanted = of_a_message if kind in MESSAGE_FAULTS + BYTE_FAULTS else any_moment
    if SETTINGS[setting_of(number, settings)].relay == GLOO:
        wanted = of_a_sum
    return Fault(kind, *place(moments, chance, wanted), _SECONDS.get(kind, 0.0), chance.randrange(2**32))


def harmless(fault: Fault) -> bool:
    return fault.kind in _SECONDS


def timeout_of(fault: Fault | None) -> float:
    """Seconds: long where a busy machine must not make a rank missed."""
    if fault is None or harmless(fault):
        return PATIENT
    return WITH_CHILDREN if fault.kind in FORKS else IMPATIENT
