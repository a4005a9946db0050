"""Ranks that stop or die in the middle: the others end with an error, in time, and nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oktopk import CommError, CommTimeout, Communicator, sparse_allreduce
from tests.support import worlds

P, VICTIM, SURVIVORS = 3, 1, (0, 2)
TIMEOUT, SLACK = 5.0, 45.0
"""Seconds: what a rank waits for the others, and what it may take to end then. A busy machine is not a bug."""

OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    "oktopk": lambda comm: sparse_allreduce(torch.ones(2000), 0.05, "oktopk", comm=comm),
    "all_reduce": lambda comm: comm.all_reduce_(torch.ones(2000), "dense"),
}


def again_and_again(connect: Callable[..., Communicator], name: str, markers: Path) -> None:
    """Work until something happens. A marker says that a rank is in the middle of it."""
    comm = connect(timeout=60.0)
    OPERATIONS[name](comm)  # compiles the kernels
    comm.timeout, end = TIMEOUT, time.monotonic() + 60
    while time.monotonic() < end:
        OPERATIONS[name](comm)
        (markers / str(comm.rank)).touch()


def strike(ranks: worlds.Ranks, markers: Path, number: signal.Signals) -> None:
    assert worlds.wait_until(lambda: len(list(markers.iterdir())) == P, 60), ranks.output()
    os.kill(ranks.pid(VICTIM), number)


def assert_survivors_know(ranks: worlds.Ranks) -> list[BaseException | None]:
    """Each says in which operation it was, and one at least says who was missing."""
    errors = [ranks.outcome(rank).error for rank in SURVIVORS]
    for error in errors:
        assert isinstance(error, CommError), repr(error)
        assert re.match(r"\w+ \([\w ]+\): ", str(error)), error
    blamed = [str(error).rpartition(" (rank")[0] or str(error) for error in errors]  # without who says so
    assert any(re.search(rf"rank {VICTIM}\b", text) for text in blamed), errors
    return errors


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gloo_rank_that_stops(name: str, tmp_path: Path) -> None:
    with worlds.start("gloo", P, again_and_again, name, tmp_path) as ranks:
        strike(ranks, tmp_path, signal.SIGSTOP)
        assert ranks.running(SURVIVORS, TIMEOUT + SLACK) == []
        assert any(isinstance(error, CommTimeout) for error in assert_survivors_know(ranks))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gloo_rank_that_is_killed(name: str, tmp_path: Path) -> None:
    with worlds.start("gloo", P, again_and_again, name, tmp_path) as ranks:
        strike(ranks, tmp_path, signal.SIGKILL)
        assert ranks.running(range(P), TIMEOUT + SLACK) == []
        assert_survivors_know(ranks)


def test_an_mpi_rank_that_stops(tmp_path: Path) -> None:
    """MPI cannot end in order without it, so the job is aborted: by then both others have said why."""
    with worlds.start("mpi", P, again_and_again, "oktopk", tmp_path) as ranks:
        strike(ranks, tmp_path, signal.SIGSTOP)
        assert ranks.running(SURVIVORS, TIMEOUT + SLACK) == []
        for error in assert_survivors_know(ranks):
            assert isinstance(error, CommTimeout)
        assert ranks.mpiexec.wait(SLACK) != 0
        assert ranks.running([VICTIM], SLACK) == []


def test_an_mpi_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    """At once, not after the timeout: the others are waiting in MPI, where an exception elsewhere is not seen."""
    program = tmp_path / "program.py"
    program.write_text(
        "import oktopk, torch\n"
        "comm = oktopk.MPICommunicator(timeout=300)\n"
        "if comm.rank == 1: raise RuntimeError('disk on fire')\n"
        "oktopk.sparse_allreduce(torch.ones(10), comm=comm)\n"
    )
    worlds.need_mpi()
    run = subprocess.run(
        [worlds.mpiexec(), "-n", "3", sys.executable, program],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert run.returncode != 0
    assert "disk on fire" in run.stderr
