"""Some of the kills of `make kills`."""

from __future__ import annotations

import pytest

from oktopk.errors import CommError
from stress.kills import run as kills
from tests.support.worlds import Outcome

COUNT = 2


@pytest.mark.timeout(300)
def test_a_run_killed_while_it_saves_resumes_from_a_whole_checkpoint() -> None:
    done = list(kills.session(COUNT, seed=1))
    assert sum(one.in_save for one in done) == COUNT
    assert [problem for one in done for problem in one.problems] == []


GOOD, KILLED = Outcome(value=1), Outcome(trace="ended without a report")
TOLD, CRASHED = Outcome(error=CommError("lost"), trace="CommError"), Outcome(error=KeyError(1), trace="KeyError")


@pytest.mark.parametrize(
    ("ends", "victims", "wrong"),
    [
        ([GOOD, GOOD, GOOD], [], 0), ([TOLD, GOOD, GOOD], [], 1), ([KILLED, TOLD, GOOD], [0], 0),
        ([KILLED] * 3, [0, 1, 2], 0), ([KILLED, CRASHED, TOLD], [0], 1), ([KILLED, KILLED, TOLD], [0], 1),
    ],
)  # fmt: skip
def test_an_end_that_is_wrong_is_told(ends: list[Outcome], victims: list[int], wrong: int) -> None:
    assert len(kills.wrong_ends(ends, victims)) == wrong
