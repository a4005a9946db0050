"""A thread that waits for other ranks can be woken by another thread of its own rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk import CommError, Communicator, GroupCommunicator, run_threads
from oktopk.comm.process_group.sums import GroupSums
from tests.support import worlds
from tests.support.communicator_contracts import SILENCED, all_here, operation_of, wait_in_vain

WAITERS = 2
Ending = tuple[Exception | None, float]
"""The error a wait has ended by, and after how long."""


def woken(comm: Communicator, name: str) -> Ending | None:
    """How the wait of another thread ended; rank 0 is the one that all others wait for."""
    if comm.rank == 0:
        return None
    found: list[Ending] = []
    waiting = threading.Thread(target=lambda: found.append(wait_in_vain(comm, name)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    comm.interrupt()
    waiting.join(40.0)  # less than the timeout of the communicator
    return found[0] if found else None


def all_woken(
    connect: Callable[..., Communicator], done: Path, companion: bool | None
) -> dict[str, Ending | None]:
    comms = {name: connect(timeout=60.0, companion=companion) for name in SILENCED}
    ends = {name: woken(comm, name) for name, comm in comms.items()}
    all_here(done, comms["recv"])
    return ends


def assert_woken(name: str, ends: list[Ending | None]) -> None:
    """By an error that says so, except for who has noticed that another one hung up."""
    assert ends[0] is None
    said = []
    for end in ends[1:]:
        assert end is not None, "it still waits"
        assert isinstance(end[0], CommError), repr(end[0])
        said.append(str(end[0]))
    assert f"{operation_of(name)}interrupted: the communicator was closed in the meantime" in said


@pytest.mark.parametrize("name", SILENCED)
def test_a_waiting_thread_is_woken_on_threads(name: str) -> None:
    assert_woken(name, run_threads(1 + WAITERS, lambda comm: woken(comm, name)))


@pytest.fixture(scope="module", params=[None, True], ids=["gloo", "companion"])
def on_processes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Ending | None]]:
    return worlds.run("gloo", 1 + WAITERS, all_woken, tmp_path_factory.mktemp("done"), request.param)


@pytest.mark.processes
@pytest.mark.parametrize("name", SILENCED)
def test_a_waiting_thread_is_woken_on_processes(name: str, on_processes: list[dict[str, Ending | None]]) -> None:
    assert_woken(name, [ends[name] for ends in on_processes])


def woken_after_another_has_left(
    connect: Callable[..., Communicator], done: Path, companion: bool | None
) -> Ending | None:
    """Rank 1 waits for rank 0 when rank 2, which comes next to it, has hung up."""
    comm = connect(timeout=60.0, companion=companion)
    left, end = done / "left", None
    if comm.rank == 2:
        comm.interrupt()
        left.touch()
    if comm.rank == 1:
        assert worlds.wait_until(left.exists, 60)
        end = woken(comm, "recv")
    all_here(done, comm)
    return end


@pytest.mark.processes
@pytest.mark.parametrize("companion", [None, True], ids=["gloo", "companion"])
def test_a_waiting_thread_is_woken_though_another_rank_has_left(tmp_path: Path, companion: bool | None) -> None:
    end = worlds.run("gloo", 3, woken_after_another_has_left, tmp_path, companion)[1]
    assert end is not None, "it still waits"
    assert "interrupted: the communicator was closed" in str(end[0])


SMALL, LARGE = 3, 1 << 20
"""Entries of a sum."""


def gives_up_in_a_sum(connect: Callable[..., Communicator], done: Path, size: int, how: str) -> float | None:
    """Rank 1 begins sums that the others do not take part in, and gives up: how long that takes."""
    comm = GroupCommunicator.exclusive(timeout=60.0)
    start = time.monotonic()
    if comm.rank == 1:
        pending = [comm.begin_all_reduce(torch.ones(size), "dense") for _ in range(3)]
        if how == "fail":
            comm.fail(CommError("enough"))
        else:
            comm.close()
        for sum_ in pending:
            with pytest.raises(CommError, match=r"all_reduce \(dense\): "):
                sum_.wait()
        with pytest.raises(CommError, match=r"all_reduce \(dense\): the communicator is closed"):
            comm.begin_all_reduce(torch.ones(size), "dense")
    took = time.monotonic() - start
    all_here(done, comm)
    return took


@pytest.mark.processes
@pytest.mark.parametrize("how", ["fail", "close"])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_giving_up_in_the_middle_of_a_sum_does_not_wait_for_other_ranks(
    tmp_path: Path, size: int, how: str
) -> None:
    took = worlds.run("gloo", 3, gives_up_in_a_sum, tmp_path, size, how)[1]
    assert took < 30


def sums_alone(
    connect: Callable[..., Communicator], done: Path, size: int, companion: bool, told: bool
) -> tuple[str, str, float] | None:
    """Rank 1 takes no part in sums that are under way: it posts why it fails, or is silent."""
    comm, end = connect(timeout=60.0, companion=companion), None
    comm.timeout = 60.0 if told else 1.5
    if comm.rank != 1:
        start = time.monotonic()
        pending = [comm.begin_all_reduce(torch.ones(size), "dense") for _ in range(3)]
        with pytest.raises(CommError) as caught:
            pending[0].wait()
        end = type(caught.value).__name__, str(caught.value), time.monotonic() - start
        for sum_ in pending[1:]:
            with pytest.raises(CommError):
                sum_.wait()
    elif told:
        time.sleep(0.5)  # they wait by then
        comm.fail(CommError("enough"))
    all_here(done, comm)
    return end


@pytest.mark.processes
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("companion", "size"), [(True, SMALL), (True, LARGE), (False, SMALL)])
def test_sums_that_one_rank_does_not_take_part_in_fail_on_the_others(
    tmp_path: Path, companion: bool, size: int, told: bool
) -> None:
    """Also in a group that was given, whose connections a failing rank cannot close."""
    ends = worlds.run("gloo", 3, sums_alone, tmp_path, size, companion, told)
    assert ends[1] is None
    others = [end for end in ends if end is not None]
    assert len(others) == 2
    assert all(took < 30 for _, _, took in others)
    assert all("rank 1" in text for _, text, _ in others)
    if told:
        assert [name for name, _, _ in others] == ["Aborted"] * 2
        assert all("rank 1 failed: enough" in text for _, text, _ in others)
    else:  # the first to give up tells the other
        assert "CommTimeout" in [name for name, _, _ in others]


def groups_of_sums(connect: Callable[..., Any]) -> list[bool]:
    """Whether a tensor is summed in the group that was given: without a companion, and with one."""
    sums = [connect(companion=companion)._sums for companion in (False, True)]
    return [one.group_of(torch.ones(3)) is one._given for one in sums]


@pytest.mark.processes
def test_a_companion_sums_apart_from_the_group_that_was_given() -> None:
    assert worlds.run("gloo", 2, groups_of_sums) == [[True, False]] * 2


class Connections:
    """A group that counts the receives that would close its connections."""

    receives = 0

    def recv(self, *args: object) -> None:
        self.receives += 1
        raise RuntimeError("closed")


def test_a_forked_process_leaves_the_connections_of_sums_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    own, child = Connections(), Connections()
    GroupSums(None, own, 0, 3).close()
    sums = GroupSums(None, child, 0, 3)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    sums.close()
    assert (own.receives, child.receives) == (2, 0)
