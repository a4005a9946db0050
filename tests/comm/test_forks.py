"""A killed rank whose forked child lives: the others notice at once, as if there were no child."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk import CommError, Communicator, OkTopkState, sparse_allreduce
from oktopk.comm.messages import Closed, pack
from oktopk.metrics.traffic import Operation
from stress.chaos.children import beside
from tests.support import worlds
from tests.support.tcp import meshes

P, VICTIM, SURVIVORS = 3, 1, (0, 2)
TIMEOUT, SOON = 300.0, 15.0
"""Seconds: what ranks wait for each other, and what they may need to notice on a busy machine. The 5 s that
docs/reliability.md promises are checked by stress/chaos."""
LONG = timedelta(seconds=30)


def average(comm: Communicator) -> object:
    return sparse_allreduce(torch.ones(2000), 0.05, "oktopk", comm=comm)


OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    "messages": average,
    "sums": lambda comm: comm.all_reduce_(torch.ones(2000), "dense"),
    "messages over gloo": average,
}


def work_with_a_child(connect: Callable[..., Communicator], name: str, folder: Path) -> None:
    """The victim forks, and works on until it is killed."""
    comm = connect(timeout=TIMEOUT, companion=name != "messages over gloo")
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


def wait_for_buffers(connect: Callable[..., Communicator], kind: str, folder: Path) -> None:
    """DDP broadcasts buffers before a forward pass, in torch's own group; rank 0 does not come to the second."""
    model = DistributedDataParallel(nn.BatchNorm1d(3))
    with OkTopkState(density=0.5, warmup_steps=0, timeout=TIMEOUT).register(model):
        model(torch.ones(4, 3)).sum().backward()
        if dist.get_rank():
            model(torch.ones(4, 3))
        else:
            with beside(kind, folder / "child.new"):
                (folder / "child.new").rename(folder / "child")
                time.sleep(3 * SOON)


@pytest.mark.parametrize("kind", ["die with a child", "die with a loader"])
def test_so_it_is_in_an_exchange_of_ddp_itself(kind: str, tmp_path: Path) -> None:
    child = tmp_path / "child"
    with worlds.start("gloo", P, wait_for_buffers, kind, tmp_path) as ranks, ended(child):
        assert worlds.wait_until(child.exists, 60), ranks.output()
        os.kill(ranks.pid(0), signal.SIGKILL)
        assert ranks.running(range(1, P), SOON) == []
        assert all(isinstance(ranks.outcome(rank).error, RuntimeError) for rank in range(1, P))


def test_a_forked_process_cannot_use_the_group_of_its_parent() -> None:
    """It gets an error; the parent's group works, also when the child has ended. Other sockets stay connected."""
    assert worlds.run("gloo", 2, sum_beside_a_child) == [2 * [[2.0]]] * 2


def sum_beside_a_child(connect: Callable[..., Communicator]) -> list[list[float]]:
    comm, sums = connect(timeout=LONG.total_seconds(), companion=True), []
    mine, childs = socket.socketpair()
    with mine, childs, select.epoll() as watched:
        watched.register(mine)
        child = fork_a_summand(childs)
        childs.close()
        assert mine.recv(4) == b"here"
        assert os.waitpid(child, 0)[1] == 0
    for _ in range(2):
        x = torch.ones(1)
        dist.all_reduce(x)
        sums.append(x.tolist())
    comm.close()
    return sums


def fork_a_summand(other: socket.socket) -> int:
    """A child that answers on a socket, and then sends a number to the other rank in torch's group."""
    child = os.fork()
    if not child:
        other.sendall(b"here")
        try:
            dist.send(torch.full((1,), 7.0), 1 - dist.get_rank())
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    return child


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
