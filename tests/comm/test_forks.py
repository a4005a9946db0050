"""A killed rank whose forked child lives: the others notice at once, as if there were no child."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from oktopk import CommError, Communicator, sparse_allreduce
from oktopk.comm.messages import Closed, pack
from oktopk.metrics.traffic import Operation
from tests.support import worlds
from tests.support.tcp import meshes

P, VICTIM, SURVIVORS = 3, 1, (0, 2)
TIMEOUT, SOON = 300.0, 15.0
"""Seconds: what ranks wait for each other, and what they may need to notice on a busy machine. The 5 s that
docs/reliability.md promises are checked by stress/chaos."""
LONG = timedelta(seconds=30)

OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    "messages": lambda comm: sparse_allreduce(torch.ones(2000), 0.05, "oktopk", comm=comm),
    "sums": lambda comm: comm.all_reduce_(torch.ones(2000), "dense"),
}


def work_with_a_child(connect: Callable[..., Communicator], name: str, folder: Path) -> None:
    """The victim forks, and works on until it is killed."""
    comm = connect(timeout=TIMEOUT, companion=True)
    OPERATIONS[name](comm)  # compiles the kernels
    if comm.rank == VICTIM:
        child = os.fork()
        if not child:
            time.sleep(2 * SOON)
            os._exit(0)
        (folder / "child.new").write_text(str(child))
        (folder / "child.new").rename(folder / "child")
    end = time.monotonic() + 3 * SOON
    while time.monotonic() < end:
        OPERATIONS[name](comm)


@contextlib.contextmanager
def ended(path: Path) -> Iterator[None]:
    """The child whose number is in a file is alive at the end, and is ended then."""
    try:
        yield
        assert worlds.is_running(int(path.read_text()))
    finally:
        if path.exists():
            os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_killed_rank_whose_child_lives_is_noticed_before_the_timeout(name: str, tmp_path: Path) -> None:
    child = tmp_path / "child"
    with worlds.start("gloo", P, work_with_a_child, name, tmp_path) as ranks, ended(child):
        assert worlds.wait_until(child.exists, 60), ranks.output()
        os.kill(ranks.pid(VICTIM), signal.SIGKILL)
        assert ranks.running(SURVIVORS, SOON) == []
        errors = [ranks.outcome(rank).error for rank in SURVIVORS]
        assert all(isinstance(error, CommError) for error in errors), errors
        assert any(f"rank {VICTIM}" in str(error) for error in errors), errors


def test_a_forked_process_leaves_the_connections_to_its_parent() -> None:
    """Its own are closed, it says so, and closing them again cuts nothing."""
    with meshes(2) as made:
        child = os.fork()
        if not child:
            code = 1
            try:
                made[0].receive(100, 1)
            except Closed:
                made[0].close()
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        receiving = made[0].receive(100, 1)
        made[1].send(pack(torch.ones(3)), 0)
        receiving.wait(LONG)
        assert torch.equal(receiving.message(1, Operation("recv", "test")), pack(torch.ones(3)))
