"""`oktopk demo`: two runs of the same time over a slow link, and what it says about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oktopk.cli import main
from oktopk.cli.commands import demo
from oktopk.tools.race.cells import find_finished
from oktopk.tools.race.links import pause_seconds

PACED = "paced:100mbit"


@pytest.mark.timeout(600)
@pytest.mark.processes
@pytest.mark.usefixtures("forked_ranks")
def test_the_demo_trains_both_for_the_same_time_and_says_what_they_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--seconds", "1", "--link", PACED, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "1 s dense (DDP), then 1 s with oktopk, over 100mbit" in said.err
    *_, sentence, page = said.out.splitlines()
    assert re.fullmatch(
        r"in the same 1 seconds: dense WER [\d.]+ % \(\d+ steps\), oktopk WER [\d.]+ % \(\d+ steps\)", sentence
    )
    assert page == f"both runs on one page: {out / 'race.html'}"
    assert (out / "race.html").stat().st_size > 10_000
    cells, problems = find_finished(out)
    assert (len(cells), problems) == (2, [])
    for cell in cells:
        clock = [step.seconds for step in cell.steps]
        assert sum(clock) >= 1 > sum(clock[:-1])
        assert all(step.seconds >= pause_seconds(PACED, step.sent_bytes) > 0 for step in cell.steps)


@pytest.mark.parametrize(
    ("asked", "problem", "taken", "said"),
    [
        ("100mbit", None, "100mbit", "between two hosts in network namespaces"),
        ("20mbit", "use sudo", "paced:20mbit", "emulated by pauses on loopback, because use sudo"),
        ("paced:1gbit", "use sudo", "paced:1gbit", ""),
        ("none", "use sudo", "none", ""),
    ],
)
def test_without_namespaces_the_link_is_emulated_by_pauses(
    asked: str,
    problem: str | None,
    taken: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(demo, "enter_user_namespace", lambda: None)
    monkeypatch.setattr(demo, "lab_problem", lambda: problem)
    monkeypatch.setattr(demo.race, "run", lambda options: ran.append(options.link) or 2)
    assert main(["demo", "--link", asked]) == 2
    assert ran == [taken]
    assert said in capsys.readouterr().err


def test_a_link_that_is_not_understood_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--link", "paced:fast", "--out", str(tmp_path / "demo")]) == 2
    assert "rate must be like 100mbit" in capsys.readouterr().err
