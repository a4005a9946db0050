"""A small version of `make meet`."""

from __future__ import annotations

import pytest

from stress import meet

pytestmark = pytest.mark.processes


def test_ranks_meet_and_messages_arrive() -> None:
    assert meet.thread_ranks(16).startswith("16 ranks on threads")
    assert meet.meet(4).startswith("4 processes met")
    assert meet.large_message(0.05).startswith("a message of 0.05 GiB")
