"""In the process of a rank: all steps of a case, and what the rank does when the moment of its fault has come."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import oktopk
from stress.chaos.cases import Job
from stress.chaos.children import beside
from stress.chaos.faults import Acts, Fault, Faulty, burn
from stress.chaos.jobs import Report, take_part
from stress.chaos.process_cases import DEATHS, GLOO, LINKS, MESH
from stress.chaos.relay import BYTE_FAULTS
from stress.chaos.relayed import gloo_through_relay, through_relay
from tests.support import worlds

PATIENCE = 30.0
"""Seconds in which what happens from outside has to happen."""


@dataclass(frozen=True)
class Orders:
    """What a rank is told."""

    job: Job
    fault: Fault | None
    timeout: float
    signs: Path
    """A folder for notes between the ranks and the process that judges."""
    companion: bool = False
    """Whether to make connections of its own, as front ends do."""
    relay: tuple[str, int] | None = None
    """Whose connections go through a relay, and its port."""


def gloo_stderr(signs: Path, rank: int) -> Path:
    """Where a rank whose gloo connections are disturbed leaves what gloo says before it ends the process."""
    return signs / f"stderr {rank}"


def rank_of_case(connect: Callable[..., oktopk.Communicator], orders: Orders) -> Report:
    """All steps, over a communicator that lets the fault happen; the error is in the report."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    signs, fault, report = orders.signs, orders.fault, Report()
    if orders.relay is not None and orders.relay[0] == GLOO:
        with gloo_stderr(signs, dist.get_rank()).open("wb") as file:
            os.dup2(file.fileno(), 2)
    with _relayed(orders):
        comm = connect(timeout=60.0, **({"companion": True} if orders.companion else {}))
    oktopk.sparse_allreduce(torch.ones(2000), 0.05, comm=comm)  # compiles the kernels
    comm.timeout = orders.timeout
    with beside(fault.kind if fault else "", signs / f"children {comm.rank}"):
        (signs / f"ready {comm.rank}").touch()
        with contextlib.suppress(Exception):
            take_part(orders.job, Faulty(comm, fault, _acts(signs)), report)
    return report


def _relayed(orders: Orders) -> contextlib.AbstractContextManager[None]:
    if orders.relay is None:
        return contextlib.nullcontext()
    whose, port = orders.relay
    return through_relay(dist.get_rank(), port, orders.signs) if whose == MESH else gloo_through_relay(port)


def _acts(signs: Path) -> Acts:
    def write_now() -> None:
        worlds._write(signs / "now", str(time.monotonic()).encode())

    def send_myself(number: signal.Signals) -> Callable[[Fault, int], None]:
        def act(fault: Fault, size: int) -> None:
            write_now()
            os.kill(os.getpid(), number)

        return act

    def let_it_happen(fault: Fault, size: int) -> None:
        """From outside, to what comes next."""
        (signs / "size").write_text(str(size))
        write_now()
        worlds.wait_until((signs / "done").exists, PATIENCE)

    return {
        "raise": burn,
        "stop": send_myself(signal.SIGSTOP),
        "stop a while": send_myself(signal.SIGSTOP),
        **dict.fromkeys(DEATHS, send_myself(signal.SIGKILL)),
        **dict.fromkeys((*LINKS, *BYTE_FAULTS), let_it_happen),
    }
