"""What a rank of a process group does when it has lost another: it hangs up, and looks for the reason."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from oktopk.comm import group
from oktopk.comm.failure_board import Loss
from oktopk.comm.group import GroupCommunicator
from oktopk.comm.messages import Closed
from oktopk.comm.tcp.handshake import MOST_UNIDENTIFIED
from oktopk.errors import Aborted, CommError, CommTimeout
from oktopk.metrics.traffic import Operation

IN_TIME, LATE = math.inf, 0.0
"""Deadlines: that of an operation that fails before it, and one that has passed."""


def explain(
    error: Exception, peer: int | None, deadline: float, reason: str | None = None, isolated: bool = False
) -> tuple[list[str], CommError]:
    """What the communicator does, in its order, and the error that it makes."""
    done: list[str] = []

    def report_loss(peer: int | None) -> Loss:
        done.append("notes")
        return Loss(reason, [] if peer is None else [peer], isolated)

    comm = object.__new__(GroupCommunicator)  # without other ranks
    comm.timeout, comm._interrupted, comm._global_ranks, comm.rank = 7.0, False, range(4), 3
    comm._board = SimpleNamespace(report_loss=report_loss)
    comm._messages = SimpleNamespace(close=lambda: done.append("hang up"))
    comm._sums = SimpleNamespace(close=lambda: None)
    return done, comm._explain(error, Operation("all_gather", "test", control=False), peer, deadline)


@pytest.mark.parametrize("peer", [None, 2])
def test_a_rank_hangs_up_before_it_waits_for_notes(peer: int | None) -> None:
    """Those that wait for it then notice at once, and leave the notes that it waits for."""
    done, error = explain(RuntimeError("connection reset"), peer, IN_TIME)
    assert done == ["hang up", "notes"]
    assert type(error) is CommError
    assert "connection reset" in str(error)


def test_a_rank_that_is_late_waits_for_notes_first() -> None:
    """Its peer is late, too, and would take a connection that is closed for the cause."""
    done, error = explain(RuntimeError("timeout"), 2, LATE)
    assert done == ["notes", "hang up"]
    assert type(error) is CommTimeout
    assert "no answer from rank 2" in str(error)


def test_a_sum_that_is_late_hangs_up_first() -> None:
    done, error = explain(RuntimeError("timeout"), None, LATE)
    assert done[:2] == ["hang up", "notes"]
    assert str(error).endswith("no answer from the other ranks within 7 s")


def test_a_rank_without_a_link_says_that_it_may_be_its_own() -> None:
    _, error = explain(RuntimeError("timeout"), None, LATE, isolated=True)
    assert str(error).endswith("nor from the job's store: its host is lost, or the link of rank 3 is down")


def test_the_reason_of_another_rank_counts() -> None:
    done, error = explain(RuntimeError("connection reset"), 2, IN_TIME, "rank 1 failed: disk full")
    assert done == ["hang up", "notes"]
    assert type(error) is Aborted
    assert str(error).endswith("rank 1 failed: disk full")


def test_a_rank_that_has_closed_its_connections_asks_nobody() -> None:
    done, _ = explain(Closed(), 2, IN_TIME)
    assert done == []


class Counted(Exception):
    pass


def test_there_are_files_for_all_who_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's connections and ours, and as many unidentified ones as the handshake admits at a time."""
    world = 5

    def check(connections: int) -> None:
        assert connections >= 2 * (world - 1) + world + MOST_UNIDENTIFIED
        raise Counted

    monkeypatch.setattr(group, "raise_file_limit", check)
    comm = object.__new__(GroupCommunicator)
    comm.world = world
    with pytest.raises(Counted):
        comm._connect(None, "job", None)
