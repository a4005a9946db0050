"""How a request of MPI is waited for, by a clock that was made up."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from oktopk.comm import mpi
from oktopk.comm.mpi import wait_for

STEP = 2e-6
"""Seconds that a test takes, and that a yield takes."""


class Request:
    """Done after so many tests; it counts them, and keeps what was slept, when, and after which test."""

    def __init__(self, needed: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.needed, self.tests, self.yields, self.now = needed, 0, 0, 100.0
        self.sleeps: list[tuple[int, float, float]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(mpi, "_yield_core", self.sched_yield)

    def test(self) -> bool:
        self.tests += 1
        self.now += STEP
        return self.tests > self.needed

    def sched_yield(self) -> None:
        self.yields += 1
        self.now += STEP

    def sleep(self, seconds: float) -> None:
        self.sleeps.append((self.tests, self.now, seconds))
        self.now += seconds


def test_what_is_done_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(0, monkeypatch)
    assert wait_for(request.test, deadline=0)
    assert (request.tests, request.yields, request.sleeps) == (1, 0, [])


@pytest.mark.parametrize("needed", [1, 63, 64, 65, 1000])
def test_others_come_first_after_every_test(monkeypatch: pytest.MonkeyPatch, needed: int) -> None:
    request = Request(needed, monkeypatch)
    assert wait_for(request.test, deadline=1e9)
    assert (request.tests, request.yields) == (needed + 1, needed)


def test_nobody_sleeps_in_the_first_10_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(0.01 / (2 * STEP) - 1, monkeypatch)
    assert wait_for(request.test, deadline=1e9)
    assert request.sleeps == []


def test_a_long_message_gets_many_tests_between_two_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(100_000, monkeypatch)
    assert wait_for(request.test, deadline=1e9)
    at = [tests for tests, _, _ in request.sleeps]
    assert len(at) > 100
    assert {after - before for before, after in pairwise(at)} == {64}


def test_sleeps_are_short_against_the_wait_and_rest_the_core_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(100_000, monkeypatch)
    start = request.now
    assert wait_for(request.test, deadline=1e9)
    for _, now, seconds in request.sleeps:
        assert 0 < seconds <= min(0.001, 0.01 * (now - start) + 1e-9)
    slept = sum(seconds for _, _, seconds in request.sleeps)
    assert slept > 0.75 * (request.now - start)


@pytest.mark.parametrize("timeout", [0.0, 0.001, 0.02, 3.0])
def test_the_deadline_is_kept_to_a_burst(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    request = Request(float("inf"), monkeypatch)
    deadline = request.now + timeout
    assert not wait_for(request.test, deadline)
    assert deadline < request.now <= deadline + 0.001 + 64 * 2 * STEP + 1e-9
