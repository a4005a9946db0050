"""Notes of ranks that have lost each other: who is really lost, and that no last word is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oktopk.comm import failure_board as notices
from oktopk.comm.failure_board import FailureBoard, Loss
from oktopk.utils.timeouts import TIMEOUTS

P = 4


class Store:
    """One in the memory of this process, or in a file, that can be held up."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.open = inner, threading.Event()
        self.open.set()

    def clone(self) -> Store:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            assert self.open.wait(60)
            return getattr(self.inner, name)(*args)

        return call


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    inner = dist.HashStore() if request.param == "memory" else dist.FileStore(str(tmp_path / "store"), 1)
    inner.set_timeout(timedelta(seconds=10))
    made = Store(inner)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    return made


def set_timeouts(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    monkeypatch.setattr(notices, "TIMEOUTS", replace(TIMEOUTS, **seconds))


def ranks() -> list[FailureBoard]:
    return [FailureBoard("job", rank, P) for rank in range(P)]


def losses(peers: dict[int, int | None]) -> dict[int, Loss]:
    """What each of these ranks finds when it has lost that peer, and all have left their notes."""
    several = ranks()
    for _ in range(2):
        found = {rank: several[rank].report_loss(peer) for rank, peer in peers.items()}
    return found


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("peers", "lost"),
    [
        ({0: 2}, {0: [2]}),
        ({0: 2, 1: 0, 3: 1}, {0: [2], 1: [2], 3: [2]}),  # each has lost the one before
        ({0: None, 1: None, 2: None}, {0: [3], 1: [3], 2: [3]}),  # in a sum
        ({0: None, 1: None}, {0: [2, 3], 1: [2, 3]}),
        ({0: 1, 1: None, 2: None}, {0: [3], 1: [3], 2: [3]}),  # waits for one that is in a sum
        ({0: 1, 1: None, 2: None, 3: None}, {0: [1], 1: [0], 2: [0], 3: [0]}),  # did not come to the sum
        ({0: 1, 1: 0}, {0: [1], 1: [0]}),  # a message was lost: they wait for each other
        (dict.fromkeys(range(P)), {0: [], 1: [], 2: [], 3: []}),  # nobody is
    ],
)
def test_who_is_lost(
    peers: dict[int, int | None], lost: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_timeouts(monkeypatch, failure_notes=0.0)
    assert losses(peers) == {rank: Loss(None, ranks) for rank, ranks in lost.items()}


@pytest.mark.usefixtures("store")
def test_a_note_that_comes_a_moment_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, failure_notes=60.0)
    several = ranks()
    with ThreadPoolExecutor(P) as pool:
        first = pool.submit(several[0].report_loss, 1)
        time.sleep(0.2)
        others = [pool.submit(several[rank].report_loss, None) for rank in (1, 2, 3)]
        assert [loss.result().ranks for loss in (first, *others)] == [[1], [0], [0], [0]]


@pytest.mark.usefixtures("store")
def test_the_first_reason_counts() -> None:
    several = ranks()
    assert not several[0].has_failures()
    several[1].post_failure("rank 1 failed: fire")
    several[2].post_failure("rank 2 failed: rank 1 failed: fire")
    assert several[0].has_failures()
    assert several[0].report_loss(2).reason == several[3].report_loss(None).reason == "rank 1 failed: fire"


def test_a_last_word_comes_through_after_a_question_that_takes_too_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_timeouts(monkeypatch, store=0.1)
    one, other = ranks()[:2]
    store.open.clear()
    assert one.report_loss(2) == Loss(None, [2], isolated=True)  # as far as is known without the store
    assert one.report_loss(None) == Loss(None, [], isolated=True)
    one.post_failure("rank 0 failed: fire")
    store.open.set()
    set_timeouts(monkeypatch, store=60.0, failure_notes=60.0)
    assert other.report_loss(3).reason == "rank 0 failed: fire"


def test_a_silent_store_is_asked_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for others looks for failures many times; threads that ask must not pile up."""
    set_timeouts(monkeypatch, store=0.1)
    one, other = ranks()[:2]
    store.open.clear()
    before = threading.active_count()
    for _ in range(10):
        assert not one.has_failures()
    assert threading.active_count() == before + 1
    store.open.set()
    set_timeouts(monkeypatch, store=60.0, silent_store=60.0)
    other.post_failure("rank 1 failed: fire")
    with one._turn:  # the thread that asked has its answer
        pass
    assert one.has_failures()


@pytest.mark.usefixtures("store")
def test_threads_of_a_rank_may_ask_at_the_same_time() -> None:
    one = ranks()[0]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(one.report_loss, 2), pool.submit(one.post_failure, "rank 0 failed: fire")]
        assert asked[0].result().ranks == [2]
        asked[1].result()
    assert ranks()[1].report_loss(0).reason == "rank 0 failed: fire"


FORGED = ["rank 1 failed: forged", "- rank 1 failed: forged", f"{'0' * 64} ?", "- 3", b"\xff\xfe"]


def forge(store: Store, note: str | bytes) -> None:
    for key in ("failed", "trouble", *(f"failed/{rank}" for rank in range(P))):
        store.inner.set(f"oktopk/job/{key}", note)


@pytest.mark.parametrize("note", FORGED)
def test_forged_notes_count_as_none(store: Store, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, failure_notes=0.1)
    boards = [FailureBoard("job", rank, P, b"key") for rank in range(P)]
    forge(store, note)
    assert not boards[0].has_failures()
    assert boards[0].report_loss(2) == Loss(None, [2])
    boards[2].post_failure("rank 2 failed: disk full")
    assert boards[0].has_failures()
    assert boards[0].report_loss(2) == Loss("rank 2 failed: disk full", [2])


def test_notes_of_another_session_count_as_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they have been signed, and stand where they stood."""
    set_timeouts(monkeypatch, failure_notes=0.1)
    earlier, later = (FailureBoard("job", 1, P, key) for key in (b"key of yesterday", b"key of today"))
    earlier.post_failure("rank 1 failed: yesterday")
    earlier.report_loss(3)
    assert not later.has_failures()
    assert later.report_loss(0) == Loss(None, [0])


@pytest.mark.parametrize("early", [None, b"of the secret"])
def test_before_ranks_have_met_notes_end_nothing(
    store: Store, early: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still say who is lost, to a rank that has lost its connections."""
    set_timeouts(monkeypatch, failure_notes=0.1)
    boards = [FailureBoard("job", rank, P, early, met=False) for rank in range(P)]
    boards[1].post_failure("rank 1 failed: early")
    assert not boards[0].has_failures()
    assert boards[0].report_loss(None).reason == "rank 1 failed: early"
    for board in boards:
        board.start_session(b"key")
    assert not boards[0].has_failures()
    boards[1].post_failure("rank 1 failed: disk full")
    assert boards[0].report_loss(None).reason == "rank 1 failed: disk full"


def test_a_note_cannot_be_moved_to_another_place(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, failure_notes=0.1)
    boards = [FailureBoard("job", rank, P, b"key") for rank in range(P)]
    boards[1].report_loss(3)
    store.inner.set("oktopk/job/failed/0", store.inner.get("oktopk/job/failed/1"))
    assert boards[2].report_loss(0) == Loss(None, [0])
    assert boards[2].report_loss(1) == Loss(None, [3])
