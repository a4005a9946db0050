"""The judge by records that were made up: every line can be met and missed, and says when it cannot tell."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from oktopk.tools.bench.names import parse_contender
from tests.support.scripts import load


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("judge", monkeypatch)


def record(scene: str, link: str, name: str, milliseconds: float, **more: Any) -> dict[str, Any]:
    figures = {
        "above_backward_seconds": 1e-3 * (milliseconds - 60),
        "cpu_seconds": 0.02,
        "sent_bytes": 0.5e6,
        "above_over_limits": 1.0,
    }
    return (
        {"scene": scene, "link": link, "name": name, "median_step_seconds": 1e-3 * milliseconds} | figures | more
    )


def run(judge: ModuleType, mine: float = 70.0, auto: float = 1000.0, **more: Any) -> list[dict[str, Any]]:
    """DDP takes a thousand times as long as a millisecond, and so do its hooks; `mine` is what decides."""
    others = {"backward": 60.0, **dict.fromkeys(judge.HOOKS, 1000.0)}
    records = []
    for scene in judge.SCENES:
        for link in judge.LINKS:
            records += [record(scene, link, name, taken) for name, taken in others.items()]
            for name in judge.OURS:
                records.append(record(scene, link, name, mine, **more))
            records.append(record(scene, link, judge.AUTO, auto))
    return records


def missed(judge: ModuleType, records: list[dict[str, Any]]) -> set[str]:
    return {verdict.line.figure for verdict in judge.judge(judge.ASKED, records) if verdict.enough is False}


def test_who_is_fast_enough_misses_nothing(judge: ModuleType) -> None:
    assert missed(judge, run(judge, mine=1000 / 61)) == set()
    assert all(verdict.enough for verdict in judge.judge(judge.ASKED, run(judge, mine=1000 / 61)))


def test_how_many_times_as_fast(judge: ModuleType) -> None:
    verdicts = judge.judge(judge.ASKED, run(judge, mine=1000 / 5.5))
    answers = {
        (verdict.line.link, verdict.line.against): verdict.enough
        for verdict in verdicts
        if verdict.line.figure == "times as fast as"
    }
    assert answers == {
        **{("none", other): True for other in judge.HOOKS},
        ("1gbit", "ddp"): False,
        ("1gbit", "ddp-fp16"): True,
        ("1gbit", "ddp-bf16"): True,
        ("1gbit", "powersgd"): True,
        ("100mbit", "ddp"): False,
        ("100mbit", "powersgd"): True,
    }


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"above_backward_seconds": 0.94 / 17.9}, "above backward, share of"),
        ({"above_over_limits": 2.01}, "above backward over both limits"),
        ({"sent_bytes": 1.31e6}, "MB sent"),
        ({"cpu_seconds": 0.0501}, "CPU ms above"),
    ],
)
def test_one_figure_too_large_is_one_line_missed(judge: ModuleType, more: dict[str, float], line: str) -> None:
    assert missed(judge, run(judge, mine=1000 / 61, **more)) == {line}


def test_eight_bit_values_have_a_bound_of_their_own(judge: ModuleType) -> None:
    verdicts = judge.judge(judge.ASKED, run(judge, mine=1000 / 61, sent_bytes=1.0e6))
    assert {verdict.line.name for verdict in verdicts if not verdict.enough} == {judge.EIGHT_BIT}


@pytest.mark.parametrize(("dense", "auto", "enough"), [
    (1000.0, 1029.9, True), (1000.0, 1030.1, False), (2.0, 2.29, True), (2.0, 2.31, False), (2.0, 1.0, True),
])  # fmt: skip
def test_auto_may_be_slower_by_3_percent_or_300_microseconds(
    judge: ModuleType, dense: float, auto: float, enough: bool
) -> None:
    known = [
        record(judge.TINY, "1gbit", "ddp", dense),
        record(judge.TINY, "1gbit", judge.AUTO, auto),
    ]
    told = [verdict for verdict in judge.judge(judge.ASKED, known) if verdict.found is not None]
    assert [(verdict.line.scene, verdict.enough) for verdict in told] == [(judge.TINY, enough)]


def test_what_was_not_measured_is_neither_met_nor_missed(judge: ModuleType) -> None:
    verdicts = judge.judge(judge.ASKED, [])
    assert {verdict.enough for verdict in verdicts} == {None}
    assert {verdict.row()[-1] for verdict in verdicts} == {None}


def test_the_main_scene_has_all_algorithms_and_both_limits(
    judge: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "free_memory", lambda: None)
    options = judge.argparse.Namespace(ranks=4, steps=15, timeout=60.0)
    for line in judge.ASKED:
        assert {line.name, line.against or line.name} <= set(judge.plan_of(line.scene, options).names)
    names = judge.plan_of(judge.MAIN, options).names
    assert {"dense", "topka", "topkdsa", "gtopk", "gaussiank", "oktopk", "oktopk-static"} == {
        name.split(":")[0] for name in names if parse_contender(name)
    }
    assert {"limit-memory", *(f"limit-link:{name}" for name in judge.OURS)} <= set(names)


def test_a_line_without_an_answer_is_told_if_it_was_to_be_measured(judge: ModuleType) -> None:
    lost = "main", "1gbit", "powersgd"
    known = [one for one in run(judge) if (one["scene"], one["link"], one["name"]) != lost]
    verdicts = judge.judge(judge.ASKED, known)
    lines = judge.unanswered(verdicts, judge.SCENES, judge.LINKS)
    assert {(line.scene, line.link, line.against) for line in lines} == {lost}
    assert judge.unanswered(verdicts, judge.SCENES, ["none"]) == []
    assert judge.unanswered(verdicts, ["tiny"], judge.LINKS) == []
