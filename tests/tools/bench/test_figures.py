"""From turns to records, to the table and to the picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from oktopk.tools.bench.plan import Plan
from oktopk.tools.bench.plot import draw
from oktopk.tools.bench.records import Record, make_records
from oktopk.tools.bench.steps import ReducerReport, TimedStep
from oktopk.tools.bench.tables import phases, text

STAGES = ("select", "encode", "exchange", "decode", "wait", "other")


def reduced(exposed: float, sent: int = 600, modelled: int = 0) -> ReducerReport:
    return ReducerReport(sent, modelled, exposed, 0.25, dict.fromkeys(STAGES, exposed / 2), 1.5)


def three_ranks(interface: int | None = 1000) -> list[dict[str, list[TimedStep]]]:
    """Three ranks, five steps: rank r takes longer by r, and steps come in disorder."""
    steps = [5.0, 1.0, 4.0, 2.0, 30.0]
    return [
        {
            "backward": [TimedStep(0.5, 0.25, interface) for _ in steps],
            "ddp": [TimedStep(10 * step + rank, 3.0, interface) for step in steps],
            "oktopk": [TimedStep(step + rank, step, interface, reduced(step, modelled=9)) for step in steps],
            "dense": [TimedStep(step, step, interface, reduced(1.0, modelled=500)) for step in steps],
        }
        for rank in range(3)
    ]


def found(link: str | None = "1gbit", interface: int | None = 1000) -> dict[str, Record]:
    plan = Plan((("backward", "ddp", "oktopk", "dense"),), 3, link)
    return {record["name"]: record for record in make_records(plan, 77, three_ranks(interface))}


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    oktopk = found()["oktopk"]
    assert oktopk["step_seconds"] == [7.0, 3.0, 6.0, 4.0, 32.0]
    assert (oktopk["median_step_seconds"], oktopk["best_step_seconds"], oktopk["steps"]) == (6.0, 3.0, 5)
    assert oktopk["cpu_seconds"] == 4.0
    assert oktopk["exposed_seconds"] == 4.0
    assert oktopk["hidden_share"] == 0.25
    assert oktopk["stage_seconds"] == pytest.approx(dict.fromkeys(STAGES, 4.2))


def test_comparisons_are_of_medians() -> None:
    known = found()
    assert known["oktopk"]["ddp_over_it"] == 42 / 6
    assert known["ddp"]["ddp_over_it"] == 1.0
    assert known["ddp"]["above_backward_seconds"] == 41.5
    assert known["backward"]["above_backward_seconds"] == 0.0


def test_the_limits_of_each_are_memory_and_its_own_bytes() -> None:
    limits = {"limit-memory": 0.5, "limit-link:oktopk": 1.5, "limit-link:topka": 7.0}
    turns = [
        {**rank, **{name: [TimedStep(seconds, 0.1, 1000)] * 5 for name, seconds in limits.items()}}
        for rank in three_ranks()
    ]
    plan = Plan((("backward", "ddp", "oktopk", "dense", *limits),), 3, "1gbit")
    known = {record["name"]: record for record in make_records(plan, 77, turns)}
    assert known["oktopk"]["limits_seconds"] == 2.0
    assert known["oktopk"]["above_over_limits"] == (6.0 - 0.5) / 2.0
    assert known["ddp"]["limits_seconds"] is known["dense"]["above_over_limits"] is None
    for name in limits:
        assert known[name]["above_backward_seconds"] is known[name]["ddp_over_it"] is None
    head, *rows = text(list(known.values())).splitlines()
    assert head.endswith("limits ms  above / limits")
    assert [row.split()[-2:] for row in rows[:3]] == [["–", "–"], ["–", "–"], ["2,000", "2.75"]]


def test_stages_add_up_in_the_table() -> None:
    shown = phases(list(found().values()))
    assert shown is not None
    head, oktopk, dense = shown.splitlines()
    assert head.split()[3:] == ["step", "backward", *STAGES, "all", "stages", "exposed"]
    assert oktopk.split() == ["1gbit", "oktopk", "6,000", "1,500", *["4,200"] * 6, "25,200", "4,000"]
    assert dense.split()[-2:] == ["3,000", "1,000"]
    assert phases([found()["ddp"]]) is None


def test_without_references_there_is_nothing_to_compare_with() -> None:
    turns = [{"oktopk": rank["oktopk"]} for rank in three_ranks()]
    (alone,) = make_records(Plan((("oktopk",),), 3), 77, turns)
    assert alone["ddp_over_it"] is None
    assert alone["above_backward_seconds"] is None


def test_it_is_said_who_counted_the_bytes() -> None:
    known = found()
    sources = {name: (record["sent_bytes"], record["sent_bytes_source"]) for name, record in known.items()}
    interface = (1000.0, "interface")
    assert sources == {
        "backward": interface,
        "ddp": interface,
        "oktopk": (600.0, "metered"),
        "dense": (600.0, "modelled"),
    }
    assert known["oktopk"]["modelled_bytes"] == 9
    assert {record["interface_bytes"] for record in known.values()} == {1000.0}


def test_on_loopback_torch_cannot_tell() -> None:
    known = found(None, None)
    assert (known["ddp"]["sent_bytes"], known["ddp"]["sent_bytes_source"]) == (None, None)
    assert known["oktopk"]["sent_bytes_source"] == "metered"
    assert known["oktopk"]["interface_bytes"] is None
    for name in ("exposed_seconds", "hidden_share", "stage_seconds"):
        assert known["ddp"][name] is None


def test_references_of_several_groups_are_pooled() -> None:
    turns = [{name: 2 * own for name, own in rank.items()} for rank in three_ranks()]
    (ddp,) = make_records(Plan((("ddp",),), 3), 77, turns)
    assert ddp["steps"] == 10


def test_contenders_are_compared_with_the_references_of_their_own_group() -> None:
    """The machine is ten times slower while the second group is measured."""

    def turns(*seconds: float) -> list[TimedStep]:
        return [TimedStep(one, 1.0, None) for one in seconds]

    plan = Plan((("backward", "ddp", "topka"), ("backward", "ddp", "oktopk", "gtopk")), 3)
    rank = {
        "backward": turns(1, 1, 1, 10, 10, 10),
        "ddp": turns(4, 4, 4, 40, 40, 40),
        "topka": turns(2, 2, 2),
        "oktopk": turns(20, 20, 20),
        "gtopk": turns(80, 80, 80),
    }
    known = {record["name"]: record for record in make_records(plan, 77, [rank] * 3)}
    assert {name: known[name]["ddp_over_it"] for name in plan.names} == {
        "backward": 22 / 5.5, "ddp": 1.0, "topka": 2.0, "oktopk": 2.0, "gtopk": 0.5,
    }  # fmt: skip
    above = {name: known[name]["above_backward_seconds"] for name in plan.names}
    assert above == {"backward": 0.0, "ddp": 16.5, "topka": 1.0, "oktopk": 10.0, "gtopk": 70.0}
    assert known["ddp"]["steps"] == 6


def test_the_table() -> None:
    lines = [line.split("  ") for line in text(list(found().values())).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0][:4] == ["link", "contender", "step ms", "best ms"]
    assert cells[2] == [
        "1gbit",
        "ddp",
        "42,000",
        "12,000",
        "1",
        "41,500",
        "3,000",
        "0.001 (link)",
        "244 %",
        "–",
        "–",
    ]
    assert cells[3][-4:] == ["0.0006", "146 %", "4,000", "25 %"]
    assert cells[4][-4:-2] == ["0.0006 (model)", "146 %"]
    notes = ["(model)", "(link)", "exposed", "of dense", "density asked for"]
    assert [line[0].split(":")[0] for line in cells[5:]] == notes
    assert "(link)" not in text(list(found(None, None).values()))
    assert text(list(found(None, None).values())).splitlines()[1].split()[0] == "loopback"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture(suffix: str, tmp_path: Path) -> None:
    several = [*found("none").values(), *found("1gbit").values()]
    draw(several, tmp_path / f"bench.{suffix}")
    (made,) = tmp_path.iterdir()
    head = made.read_bytes()[:2000]
    assert head.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
