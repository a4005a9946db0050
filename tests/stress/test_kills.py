"""Some of the kills of `make kills`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_an_interrupted_session_goes_on_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, object]] = []

    def session(count: int, seed: int | str) -> Iterator[kills.Kill]:
        asked.append((count, seed))
        for number in range(count):
            if len(asked) == 1 and number == 2:
                raise KeyboardInterrupt
            yield kills.Kill(kills.RANK, True, "new", ())

    monkeypatch.setattr(kills, "session", session)
    monkeypatch.setattr(sys, "argv", ["run.py", "--kills", "5", "--out", str(tmp_path / "kills.jsonl")])
    with pytest.raises(KeyboardInterrupt):
        kills.main()
    assert kills.main() == 0
    assert asked == [(5, 0), (3, "0 after 2")]
    row = next(line for line in capsys.readouterr().out.splitlines() if kills.RANK in line)
    assert row.split()[-6:] == ["5", "5", "5", "0", "0", "0"]
