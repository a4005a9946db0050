"""Tests of the lab are skipped where there can be none, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from labs import machine_interfaces, spaces_of

from oktopk.tools.lab import lab_problem, owner


@pytest.fixture(scope="module")
def buildable() -> None:
    if problem := lab_problem():
        pytest.skip(problem)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Every test of the lab leaves the machine as it was."""
    before = machine_interfaces()
    yield
    assert spaces_of(os.getpid()) == []
    assert machine_interfaces() == before
    assert owner._on_signal not in map(signal.getsignal, signal.valid_signals())
