"""A thread that waits for other ranks can be woken by another thread of its own rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import worlds
from test_failing_ranks import SILENCED, all_here, wait_in_vain

from oktopk import CommError, Communicator, GroupCommunicator, run_threads
from oktopk.comm import group
from oktopk.metrics.traffic import Operation

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
    waiting.join(1.0)
    assert waiting.is_alive()
    comm.interrupt()
    waiting.join(20.0)
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
    assert f"{name} (silence): the communicator has been closed in the middle of it" in said


@pytest.mark.parametrize("name", SILENCED)
def test_a_waiting_thread_is_woken_on_threads(name: str) -> None:
    assert_woken(name, run_threads(1 + WAITERS, lambda comm: woken(comm, name)))


@pytest.fixture(scope="module", params=[None, True], ids=["gloo", "companion"])
def on_processes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Ending | None]]:
    return worlds.run("gloo", 1 + WAITERS, all_woken, tmp_path_factory.mktemp("done"), request.param)


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


@pytest.mark.parametrize("companion", [None, True], ids=["gloo", "companion"])
def test_a_waiting_thread_is_woken_though_another_rank_has_left(tmp_path: Path, companion: bool | None) -> None:
    end = worlds.run("gloo", 3, woken_after_another_has_left, tmp_path, companion)[1]
    assert end is not None, "it still waits"
    assert "closed in the middle of it" in str(end[0])


def hangs_up_in_a_sum(connect: Callable[..., Communicator], done: Path) -> float | None:
    """Rank 1 begins a sum that the others do not take part in, and gives up: how long that takes."""
    comm = GroupCommunicator.exclusive(timeout=60.0)
    start, x = time.monotonic(), torch.ones(group._LARGE // 4)
    if comm.rank == 1:
        wait = comm.post_sum(x, Operation("all_reduce", "dense"))
        assert comm._sums, "it is not one of our own"
        comm.fail(CommError("enough"))
        with pytest.raises(CommError):
            wait()
    took = time.monotonic() - start
    all_here(done, comm)
    return took


def test_who_gives_up_in_the_middle_of_a_large_sum_need_not_wait_for_the_others(tmp_path: Path) -> None:
    took = worlds.run("gloo", 3, hangs_up_in_a_sum, tmp_path)[1]
    assert took < 30


def swaps_alone(connect: Callable[..., Communicator], done: Path, told: bool) -> tuple[str, str, float] | None:
    """Rank 1 takes no part in a round of a small sum: it says why it fails, or nothing at all."""
    comm, end = GroupCommunicator.exclusive(timeout=60.0 if told else 3.0), None
    start, x = time.monotonic(), torch.ones(3)
    if comm.rank != 1:
        wait = comm.post_swap(torch.empty(3), x, Operation("all_reduce", "dense"))
        with pytest.raises(CommError) as caught:
            wait()
        end = type(caught.value).__name__, str(caught.value), time.monotonic() - start
    elif told:
        comm.fail(CommError("enough"))
    all_here(done, comm)
    return end


@pytest.mark.parametrize("told", [True, False])
def test_a_round_that_one_rank_does_not_take_part_in_ends_on_the_others(told: bool, tmp_path: Path) -> None:
    ends = worlds.run("gloo", 3, swaps_alone, tmp_path, told)
    assert ends[1] is None
    heard = [end for end in ends if end is not None]
    assert len(heard) == 2
    assert all(took < 30 for _, _, took in heard)
    if told:
        assert [name for name, _, _ in heard] == ["Aborted"] * 2
        assert all("rank 1 failed: enough" in said for _, said, _ in heard)
    else:  # the first to give up tells the other
        assert "CommTimeout" in [name for name, _, _ in heard]
