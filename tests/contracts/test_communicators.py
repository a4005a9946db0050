"""The contract of every communicator: threads, process groups, MPI, and each of them metered.

A contract is a function that all ranks call with their communicator. In a world of processes they run one after
another on the same communicator, so that one which leaves something behind is found out by the next; only after
one that fails do they get a new one.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from oktopk import Communicator, Metered, run_threads
from tests.support import worlds
from tests.support.communicator_contracts import CONTRACTS

TIMEOUT = 15.0


PROCESS_WORLDS = [(transport, size) for transport in ("gloo", "gloo-companion", "mpi") for size in worlds.SIZES]
PROCESS_WORLDS += [("gloo-metered", 3), ("mpi-metered", 3)]  # the meter does not care for what is below it


def keep_journal(directory: Path, transport: str, connect: Callable[..., Communicator], **options: bool) -> None:
    """Run the contracts and write down how each went. After one that fails the ranks meet and connect anew."""
    meeting, comm, failed = connect(timeout=60.0), None, 0
    if (transport, meeting.world) not in PROCESS_WORLDS:
        return
    with (directory / f"{transport}-{meeting.world}.{meeting.rank}").open("w") as journal:
        for name, contract in CONTRACTS.items():
            comm = comm or connect(timeout=TIMEOUT, **options)
            failure = ""
            try:
                contract(Metered(comm) if transport.endswith("metered") else comm)
            except BaseException:  # pytest's own failures are no Exceptions
                failure = traceback.format_exc()
            journal.write(json.dumps([name, failure]) + "\n")
            journal.flush()
            if any(bad for (bad,) in meeting.all_gather_ints([bool(failure)], "meeting")):
                comm, failed = None, failed + 1
            if failed == 2:
                return  # enough to look at


def gloo_contracts(connect: Callable[..., Communicator], directory: Path) -> None:
    keep_journal(directory, "gloo", connect)
    keep_journal(directory, "gloo-metered", connect)
    keep_journal(directory, "gloo-companion", connect, companion=True)


MPI_ROUNDS = ((8,), (7, 1), (5, 3), (4, 2))
"""Starting MPI ranks is slow: start eight, and in each round cut them into worlds of these sizes."""


def mpi_contracts(connect: Callable[..., Communicator], directory: Path) -> None:
    from mpi4py import MPI

    everybody = MPI.COMM_WORLD
    for sizes in MPI_ROUNDS:
        edges = [0, *accumulate(sizes)]
        place = [start <= everybody.rank < stop for start, stop in pairwise(edges)]
        part = everybody.Split(place.index(True) if any(place) else MPI.UNDEFINED, everybody.rank)
        for transport in ("mpi", "mpi-metered") if any(place) else ():
            keep_journal(directory, transport, partial(connect, part))


class Journals:
    """What the ranks of process worlds have written down; each world is started once, when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.crashes: dict[tuple[str, int], str] = {}

    def failures(self, transport: str, size: int, contract: str) -> str:
        crash = self._run(transport.partition("-")[0], size)
        failures = []
        for rank in range(size):
            path = self.directory / f"{transport}-{size}.{rank}"
            lines = path.read_text().splitlines() if path.exists() else []
            done = dict(json.loads(line) for line in lines)
            not_reached = f"not reached: {next(reversed(done), 'the start')} was the last. {crash}"
            if failure := done.get(contract, not_reached):
                failures.append(f"{contract} on rank {rank} of {size}, {transport}: {failure}")
        return "\n".join(failures)

    def _run(self, transport: str, size: int) -> str:
        start = (transport, 8 if transport == "mpi" else size)
        if start not in self.crashes:
            job = mpi_contracts if transport == "mpi" else gloo_contracts
            try:
                worlds.run(*start, job, self.directory, timeout=100)
                self.crashes[start] = ""
            except AssertionError as error:
                self.crashes[start] = str(error)
        return self.crashes[start]


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Journals:
    return Journals(tmp_path_factory.mktemp("journals"))


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("size", worlds.SIZES)
@pytest.mark.parametrize("metered", [False, True], ids=["plain", "metered"])
def test_contract_on_threads(size: int, contract: str, metered: bool) -> None:
    run_threads(size, lambda comm: CONTRACTS[contract](Metered(comm) if metered else comm), TIMEOUT)


@pytest.mark.processes
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("transport", "size"), PROCESS_WORLDS)
def test_contract_on_processes(transport: str, size: int, contract: str, journals: Journals) -> None:
    failures = journals.failures(transport, size, contract)
    assert not failures, failures


# A rank that takes no part. Rank 0 is the one that every operation needs: the root, and everybody's peer.
