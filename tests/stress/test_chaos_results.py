"""What `make chaos` keeps of its cases, so that an interrupted run goes on, and what it shows at the end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from stress.chaos import on_processes, run
from stress.chaos.judging import CHANGED, ENDED, HANG, WENT_ON, WRONG, Verdict
from stress.chaos.results import Results, table

THREADS, PROCESSES = run.THREADS, run.PROCESSES
FINE, BAD = Verdict(3, "drop", ENDED, late=0.25), Verdict(4, "die", WRONG, "nobody names rank 1")


def keep(results: Results, where: str, *verdicts: Verdict) -> None:
    assert list(results.kept(where, verdicts)) == list(verdicts)


def test_what_is_in_the_file_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "chaos.jsonl"
    first = Results(path)
    keep(first, THREADS, FINE, BAD)
    keep(first, PROCESSES, FINE)
    again = Results(path)
    assert again.known == first.known
    assert again.missing(THREADS, range(3, 6)) == [5]
    assert again.missing(PROCESSES, range(3, 6)) == [4, 5]


def test_half_a_line_is_a_case_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "chaos.jsonl"
    keep(Results(path), THREADS, FINE, BAD)
    path.write_text(path.read_text()[:-7])
    again = Results(path)
    assert again.of(THREADS, range(9)) == [FINE]
    keep(again, THREADS, BAD)
    assert Results(path).of(THREADS, range(9)) == [FINE, BAD]


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def examine(number: int, settings: object = None) -> Verdict:
        if number == stop:
            raise KeyboardInterrupt
        seen.append(number)
        return Verdict(number, "drop", ENDED)

    monkeypatch.setattr(on_processes, "examine", examine)
    monkeypatch.setattr(on_processes, "marked", contextlib.nullcontext)
    command = ["--threads", "0", "--processes", "4", "--settings", "tcp", "--out", str(tmp_path / "out")]
    stop = 2
    with pytest.raises(KeyboardInterrupt):
        run.main(command)
    stop = -1
    assert run.main(command) == 0
    assert seen == [0, 1, 2, 3]
    assert "| all | 4 | 4 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize(("went", "code"), [(ENDED, 0), (WENT_ON, 0), (CHANGED, 0), (WRONG, 1), (HANG, 1)])
def test_a_bad_case_is_the_exit_code_though_it_is_an_old_one(tmp_path: Path, went: str, code: int) -> None:
    keep(Results(tmp_path / "out"), THREADS, Verdict(0, "drop", went))
    assert run.main(["--threads", "1", "--processes", "0", "--out", str(tmp_path / "out")]) == code


def test_the_table_is_that_of_the_page() -> None:
    verdicts = [FINE, FINE, BAD, Verdict(7, "die", WENT_ON)]
    assert table(verdicts).splitlines() == [
        "| fault | cases | named error | continued | hangs | wrong | leaks |",
        "|---|---|---|---|---|---|---|",
        "| die | 2 | 0 | 1 | 0 | 1 | 0 |",
        "| drop | 2 | 2 | 0 | 0 | 0 | 0 |",
        "| all | 4 | 2 | 1 | 0 | 1 | 0 |",
    ]
    assert "changed sum" in table([Verdict(1, "corrupt bytes", CHANGED)])
