"""Random cases for real processes: fewer ranks, and faults that threads cannot have."""

from __future__ import annotations

import random
from collections.abc import Sequence

import oktopk
from oktopk.wire.message import VALUE_CODES
from stress.chaos.cases import Job, place
from stress.chaos.faults import MESSAGE_FAULTS, Fault, Moment
from tests.support import stepping

IMPATIENT, PATIENT = 2.0, 40.0
SIGNALS = ("stop", "stop a while", "die")
LINKS = ("link down", "link down a while")
EVERYWHERE = (*MESSAGE_FAULTS, "slow", "raise")
KINDS = {"gloo": (*EVERYWHERE, *SIGNALS), "mpi": (*EVERYWHERE, "stop", "stop a while"), "lab": (*LINKS, "die")}
"""By transport. A rank of an MPI job that is killed ends it: that is mpiexec's work, not ours."""
_SECONDS = {"delay": 0.2, "slow": 0.02, "stop a while": 1.0, "link down a while": 1.0}


_SHARES = ("gloo", "lab", "gloo", "mpi", "gloo", "lab", "gloo")


def transport_of(number: int, transports: Sequence[str]) -> str:
    """They take turns, as often as they have shares."""
    shares = [name for name in _SHARES if name in transports]
    return shares[number % len(shares)]


def kind_of(number: int, transports: Sequence[str]) -> str:
    """So do the faults of each transport: none is left out by chance."""
    transport = transport_of(number, transports)
    before = sum(transport_of(earlier, transports) == transport for earlier in range(number))
    return KINDS[transport][before % len(KINDS[transport])]


def job_of(number: int) -> Job:
    """Sparse steps only: what comes of them is the same on all transports, to the bit."""
    chance = random.Random(f"process job {number}")
    return Job(
        world=chance.choice((2, 3, 3, 4)),
        algorithm=chance.choice([name for name in oktopk.ALGORITHMS if name != "dense"]),
        front_end=chance.choice(("reducer", "collective")),
        steps=4,
        density=chance.choice((0.05, 0.3)),
        values=chance.choice(list(VALUE_CODES)),
        buckets=chance.choice(("model", stepping.SEVERAL)),
        fusion_entries=chance.choice((0, 1000)),
    )


def fault_of(number: int, transports: Sequence[str], moments: Sequence[Sequence[Moment]]) -> Fault:
    chance, kind = random.Random(f"process fault {number}"), kind_of(number, transports)
    return Fault(kind, *place(kind, moments, chance), _SECONDS.get(kind, 0.0), chance.randrange(2**32))


def harmless(fault: Fault) -> bool:
    return fault.kind in _SECONDS
