"""Ranks that stay silent, fail, or are interrupted: the others hear about it, in time."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oktopk import Aborted, CommError, CommTimeout, Communicator, GroupCommunicator, OkTopkError, run_threads
from oktopk.comm import alone, packed_bytes
from tests.support import worlds
from tests.support.communicator_contracts import (
    CONTRACTS,
    SILENCED,
    all_here,
    assert_usable,
    letter,
    operation_of,
    wait_in_vain,
)
from tests.support.machine import heeded

TIMEOUT = 15.0


SHORT = 1.0


def silent_rank_zero(connect: Callable[..., Communicator], done: Path, options: dict[str, Any]) -> dict[str, Any]:
    comms = {name: connect(timeout=60.0, **options) for name in SILENCED}
    for comm in comms.values():
        comm.timeout = SHORT
    waited = {name: wait_in_vain(comm, name) for name, comm in comms.items() if comm.rank}
    all_here(done, comms["recv"])
    return waited


def assert_timed_out(name: str, waits: list[tuple[Exception | None, float]]) -> None:
    """The first to give up says why; by then its peers may find their connection to it closed."""
    for error, seconds in waits:
        assert isinstance(error, CommError), repr(error)
        assert str(error).startswith(operation_of(name)), error
        assert seconds < SHORT + 30  # nobody waited for the timeout of its connection, or for ever
    timeouts = [error for error, _ in waits if isinstance(error, CommTimeout)]
    assert timeouts
    assert all(isinstance(error, TimeoutError) and "within 1 s" in str(error) for error in timeouts)


@pytest.mark.parametrize("name", SILENCED)
def test_a_silent_rank_is_a_timeout_on_threads(name: str) -> None:
    waits = run_threads(3, lambda comm: wait_in_vain(comm, name) if comm.rank else None, SHORT)
    assert_timed_out(name, [wait for wait in waits if wait])


@pytest.mark.parametrize("silent", range(4))
def test_who_is_silent_in_a_sum_is_named_on_threads(silent: int) -> None:
    """By whoever gives up first, though only rank 0 waits for it, and the others for rank 0."""

    first = (silent + 1) % 4

    def job(comm: Communicator) -> str | None:
        if comm.rank == silent:
            return None
        if comm.rank == first:
            comm.timeout = SHORT  # the others wait for longer
        error, _ = wait_in_vain(comm, "all_reduce")
        if comm.rank == first and error is not None:
            comm.fail(error)  # which ends the wait of the others
        return str(error)

    with pytest.raises(CommTimeout) as raised:
        run_threads(4, job, 60 * SHORT)
    assert str(raised.value) == f"all_reduce (silence): no message from rank {silent} within 1 s"


SILENT_WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gloo": ("gloo", {}),
    "gloo-companion": ("gloo", {"companion": True}),
    "mpi": ("mpi", {}),
}


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[worlds.Outcome]]:
    """What became of ranks 1 and 2 in each of the worlds; they wait at the same time."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (transport, options) in SILENT_WORLDS.items():
            if transport != "mpi" or worlds.has_mpi():
                done = tmp_path_factory.mktemp(name)
                ranks = worlds.start(transport, 3, silent_rank_zero, done, options)
                started[name] = stack.enter_context(ranks)
        for name, ranks in started.items():
            assert ranks.running(range(3), 60) == [], name
        return {name: [ranks.outcome(1), ranks.outcome(2)] for name, ranks in started.items()}


@pytest.mark.processes
@pytest.mark.parametrize("name", SILENCED)
@pytest.mark.parametrize("world", SILENT_WORLDS)
def test_a_silent_rank_is_a_timeout_on_processes(
    world: str, name: str, waited: dict[str, list[worlds.Outcome]]
) -> None:
    if world == "mpi":
        worlds.need_mpi()
    for outcome in waited[world]:
        assert outcome.value, outcome.trace
    assert_timed_out(name, [outcome.value[name] for outcome in waited[world]])
    assert all("rank 0" in str(outcome.value[name][0]) for outcome in waited[world])


def connect_late(connect: Callable[..., Communicator], done: Path) -> str | None:
    """Rank 1 does not come until the others have given up."""
    if dist.get_rank() == 1:
        assert worlds.wait_until(lambda: len(list(done.iterdir())) == 2, 60)
        return None
    try:
        with pytest.raises(CommError) as caught:
            GroupCommunicator.exclusive(timeout=3 * SHORT)
        return str(caught.value)
    finally:
        (done / str(dist.get_rank())).touch()


@pytest.mark.processes
def test_who_does_not_come_to_connect_is_named(tmp_path: Path) -> None:
    said = worlds.run("gloo", 3, connect_late, tmp_path)
    for rank in (0, 2):
        assert said[rank].startswith("barrier (connecting): ")
        assert "rank 1" in said[rank]


# A rank that fails.


def stopped(errors: dict[int, BaseException], comm: Communicator) -> None:
    """Wait for rank 0, and remember how that ended."""
    try:
        comm.recv(100, 0, "forever")
    except BaseException as error:
        errors[comm.rank] = error
        raise


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_an_error_of_one_thread_ends_all_at_once(size: int, error: BaseException) -> None:
    errors: dict[int, BaseException] = {}

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            raise error
        stopped(errors, comm)

    start = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run_threads(size, job, timeout=100)
    assert caught.value is error
    assert time.monotonic() - start < 50  # half of the timeout: nobody waited for it
    assert sorted(errors) == list(range(1, size))
    for other in errors.values():
        assert isinstance(other, Aborted)
        assert "recv (forever)" in str(other)
        assert "rank 0" in str(other)
        assert repr(error) in str(other)


def test_an_aborted_world_refuses_every_operation() -> None:
    refused: list[str] = []

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ValueError("bad")
        with pytest.raises(Aborted):
            comm.recv(100, 0, "first")
        for name, operation in SILENCED.items():
            with pytest.raises(Aborted, match=re.escape(operation_of(name))):
                operation(comm)
            refused.append(name)

    with pytest.raises(ValueError, match="bad"):
        run_threads(2, job, timeout=100)
    assert refused == list(SILENCED)


@pytest.mark.parametrize("started", [False, True], ids=["while they start", "when all have started"])
def test_an_interrupt_ends_the_threads(started: bool) -> None:
    """Ctrl-C reaches the main thread, which waits for the ranks: they do not go on without it."""
    errors: dict[int, BaseException] = {}
    main = threading.main_thread().ident
    assert main is not None

    def job(comm: Communicator) -> None:
        if started:
            assert_usable(comm)
        if comm.rank == 0:
            signal.pthread_kill(main, signal.SIGINT)
        stopped(errors, comm)

    before = set(threading.enumerate())
    with heeded(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        run_threads(3, job, timeout=60)
    assert worlds.wait_until(lambda: set(threading.enumerate()) <= before, 60)
    assert {type(error) for error in errors.values()} == {Aborted}


def test_run_threads_gives_results_in_rank_order_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    assert run_threads(8, lambda comm: 10 * comm.rank) == [10 * rank for rank in range(8)]
    assert set(threading.enumerate()) <= before


def test_a_message_is_never_cut() -> None:
    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(letter(50), 1, "cut")
        else:
            comm.recv(packed_bytes(49), 0, "cut")

    with pytest.raises(OkTopkError, match=r"recv \(cut\).*from rank 0"):
        run_threads(2, job, TIMEOUT)


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_has_at_least_one_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {size}"):
        run_threads(size, lambda comm: None)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract_of_the_only_rank(contract: str) -> None:
    CONTRACTS[contract](alone())
