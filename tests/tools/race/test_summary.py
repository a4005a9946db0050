"""What cells say together: times to target, misses, ratios, crossovers, and every way to show them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli import main
from oktopk.tools.race.cells import CELLS, CellFolder, Finished, Point, Step
from oktopk.tools.race.output import write_outputs
from oktopk.tools.race.output.figure import draw
from oktopk.tools.race.output.headline import race_tiles
from oktopk.tools.race.output.page import build_page, links_of
from oktopk.tools.race.output.tables import csv_text, text
from oktopk.tools.race.spec import FULL, QUALITY, TIMING, Cell, Race, Spec, Target
from oktopk.tools.race.summary import build_summary

PARAMETERS = 1000
TARGET = Race({"dnn": "gpt-small"}, ranks=2, steps=10, target=Target("val loss", 2.0), val_every=1)
RING = 4.0 * PARAMETERS
OURS = "oktopk:<b>"  # names are escaped on the page


def cell(
    name: str, link: str, losses: list[float | None], step: float, seed: int = 0, kind: str = FULL,
    sent: float = RING, race: Race = TARGET, phase: str = "dense",
) -> Finished:  # fmt: skip
    """A finished cell whose steps all take `step` seconds, with a validation after each."""
    steps = [Step(number, phase, step, sent) for number in range(1, len(losses) + 1)]
    curve = [Point(s.step, s.step * step, s.step * sent, {"val loss": losses[s.step - 1]}) for s in steps]
    result = {"ended": "limit", "steps": len(steps), "parameters": PARAMETERS, "metric": "val loss"}
    return Finished(Spec(race, Cell(name, link, seed, kind)), result, curve, steps)


def row(document: dict[str, Any], name: str, link: str, how: str = "full") -> dict[str, Any]:
    return next(r for r in document["rows"] if (r["contender"], r["link"], r["how"]) == (name, link, how))


def document() -> dict[str, Any]:
    return build_summary(TARGET, [
        cell("ddp", "100mbit", [4, 3, 2], 1.0), cell("ddp", "100mbit", [4, 3, 3, 2], 1.0, seed=1),
        cell(OURS, "100mbit", [4, 3, 3, 3, 2], 0.1, sent=RING / 50), cell(OURS, "100mbit", [4, 2], 0.1, seed=1),
        cell("ddp", "1gbit", [4, 3, 2], 0.1), cell(OURS, "1gbit", [4, 3, 3, 3, 2], 0.2, sent=RING / 50),
        cell("powersgd:1", "100mbit", [4, 3, 2.5, None], 0.1),
    ])  # fmt: skip


def test_time_to_target_is_the_clock_of_the_first_validation_that_reaches_it() -> None:
    found = row(document(), "ddp", "100mbit")
    assert found["seconds"]["values"] == [3.0, 4.0]
    assert found["seconds"]["std"] == pytest.approx(0.5**0.5)
    assert found["steps"]["mean"] == 3.5
    ours = row(document(), OURS, "100mbit")
    assert ours["seconds"]["mean"] == pytest.approx(0.35)
    assert ours["ddp_over_it"] == pytest.approx(10.0)
    assert row(document(), "ddp", "1gbit")["of_dense"] == pytest.approx(1.0)
    assert row(document(), OURS, "1gbit")["of_dense"] == pytest.approx(0.02)


def test_a_target_that_is_not_reached_is_said_so() -> None:
    found = document()
    missed = row(found, "powersgd:1", "100mbit")
    assert missed["seconds"] is None
    assert "not reached in 4 steps; best 2.5" in text(found)
    partly = build_summary(TARGET, [cell("ddp", "none", [1.5], 1.0), cell("ddp", "none", [3.0], 1.0, seed=1)])
    assert "not reached by 1 of 2 seeds in 1 steps; best 1.5" in text(partly)


def test_a_target_that_the_first_weights_reach_takes_no_time() -> None:
    start = Finished(Spec(TARGET, Cell("ddp", "none", 0)), cell("ddp", "none", [], 1.0).result,
                     [Point(0, 0.0, 0.0, {"val loss": 1.0})], [])  # fmt: skip
    assert row(build_summary(TARGET, [start]), "ddp", "none")["seconds"]["mean"] == 0
    assert "0.0 s" in text(build_summary(TARGET, [start]))


def test_crossover_is_measured_between_links_and_predicted_from_the_fastest() -> None:
    slow, fast = 1e8, 1e9
    compute, sent, extra = 1.0, 1e7, 0.4
    dense = [compute + 8 * sent / rate for rate in (slow, fast)]
    cells = [
        cell("ddp", link, [2], step, sent=sent) for link, step in zip(("100mbit", "1gbit"), dense, strict=True)
    ]
    cells += [cell("oktopk", link, [2], compute + extra, sent=0.0) for link in ("100mbit", "1gbit")]
    (found,) = build_summary(TARGET, cells)["crossovers"]
    exact = 8 * sent / extra
    assert found["predicted"] == pytest.approx(exact, rel=1e-6)
    assert found["measured"] == pytest.approx(exact, rel=1e-6)
    assert found["faster_on"] == [slow]


def test_composed_rows_say_so_and_differ_by_a_percentage_from_full_ones() -> None:
    found = build_summary(TARGET, [
        cell("ddp", "none", [4, 3, 2], 0.1, kind=QUALITY),
        cell("ddp", "20mbit", [3.0] * 12, 5.0, kind=TIMING, sent=70.0),
        cell("ddp", "20mbit", [4, 3, 2], 4.0),
    ])  # fmt: skip
    composed = row(found, "ddp", "20mbit", "composed")
    assert composed["seconds"]["mean"] == pytest.approx(15.0)
    assert composed["sent_bytes"] == pytest.approx(70.0)
    assert row(found, "ddp", "20mbit")["seconds"]["mean"] == pytest.approx(12.0)
    assert found["deviations"][0]["composed_over_full"] == pytest.approx(0.25)
    assert "composed is +25.0 % from the full run" in text(found)
    assert {r["link"] for r in found["rows"]} == {"20mbit"}  # quality cells are no rows of their own


def test_equal_time_is_ranked_by_the_last_metric() -> None:
    race = Race({"dnn": "gpt-small"}, seconds=10.0)
    cells = [cell("ddp", "none", [4, 3], 5.0, race=race), cell("oktopk", "none", [4, 2, 2.5], 3.0, race=race)]
    found = build_summary(race, cells)
    assert [r["contender"] for r in found["rows"]] == ["oktopk", "ddp"]
    assert "steps in 10 s" in text(found)
    assert "2.5000" in text(found)
    assert build_page(found)


def write(out: Path, *cells: Finished) -> None:
    """The folders of finished cells, as their jobs would have left them."""
    for one in cells:
        folder = CellFolder(out / CELLS / one.spec.cell.name)
        folder.prepare(one.spec)
        folder.open(0)
        for step in one.steps:
            folder.add_step(step)
        for point in one.curve:
            folder.add_point(point)
        folder.finish(one.result)


def test_cells_without_a_target_are_judged_by_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    race = Race({"dnn": "gpt-small"})
    write(tmp_path, cell("ddp", "none", [4, 3, 2], 1.0, race=race))
    for target, said in (("val loss<=3", "2.0 s"), ("val loss<=2", "3.0 s"), ("val loss<=1", "not reached")):
        assert main(["race", "--report", str(tmp_path), "--target", target]) == 0
        assert said in capsys.readouterr().out
    assert main(["race", "--report", str(tmp_path), "--target", "val acc>=1"]) == 2
    assert "there are val loss" in capsys.readouterr().err


def test_a_cell_that_ended_at_its_target_is_not_judged_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = cell("ddp", "none", [4, 3, 2], 1.0)
    write(tmp_path, Finished(ended.spec, {**ended.result, "ended": "target"}, ended.curve, ended.steps))
    assert main(["race", "--report", str(tmp_path), "--target", "val loss<=2"]) == 0
    assert main(["race", "--report", str(tmp_path), "--target", "val loss<=1.5"]) == 2
    assert "ended when it reached val loss <= 2" in capsys.readouterr().err


def test_every_output_is_written_and_draws_again_from_the_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, cell("ddp", "none", [4, 3, 2], 1.0), cell("oktopk", "none", [4, 3, 3], 0.5))
    assert main(["race", "--report", str(tmp_path), "--figure", str(tmp_path / "race.pdf")]) == 0
    assert "not reached in 3 steps" in capsys.readouterr().out
    assert (tmp_path / "race.pdf").read_bytes().startswith(b"%PDF")
    assert json.loads((tmp_path / "race.json").read_text())["target"] == "val loss <= 2"
    before = (tmp_path / "race.svg").read_bytes()
    assert b"not reached" in before
    assert main(["race", "--report", str(tmp_path)]) == 0
    assert (tmp_path / "race.svg").read_bytes() == before
    assert [r["contender"] for r in csv.DictReader(io.StringIO((tmp_path / "race.csv").read_text()))] == [
        "ddp",
        "oktopk",
    ]


def test_a_page_loads_nothing_and_escapes_names() -> None:
    page = build_page(document())
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<b>" not in body
    assert "oktopk:&lt;b&gt;" in body
    assert not re.search(r"(src|href)=\"(?!data:)", body)


def headline(found: dict[str, Any]) -> dict[str, str]:
    return {tile.label: tile.value for tile in race_tiles(found, links_of(found))}


def test_the_headline_says_who_was_first_on_each_link() -> None:
    assert headline(document()) == {
        "Time to val loss <= 2, 1gbit": "3.3× slower than ddp",
        "Time to val loss <= 2, 100mbit": "10× faster than ddp",
        "Fewest bytes against dense": "50× fewer",
        "Trials": "7",
    }


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ([[3.0], [3.0]], "not reached"),
        ([[4, 2], [2.0]], "no clear difference"),  # 1 and 2 s, where ddp takes 1 and 2 s
        ([[2.0], [3.0]], "1.5 s"),  # only one of its seeds: ddp is alone
    ],
)
def test_the_headline_claims_nothing_that_seeds_do_not_show(losses: list[list[float]], value: str) -> None:
    ddp = [[4, 2], [2.0]] if value != "not reached" else [[3.0], [3.0]]
    cells = [cell("ddp", "none", curve, 1.0, seed=seed) for seed, curve in enumerate(ddp)]
    cells += [cell("oktopk", "none", curve, 1.0, seed=seed) for seed, curve in enumerate(losses)]
    assert headline(build_summary(TARGET, cells))["Time to val loss <= 2, loopback"] == value


def test_seeds_of_a_contender_are_one_line_with_their_range() -> None:
    page = build_page(document())
    state = json.loads(re.search(r'id="state">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    traces = state["charts"]["link1-time"]["data"]
    named = [trace["name"] for trace in traces if trace.get("showlegend", True)]
    assert sorted(named) == ["ddp", "oktopk:&lt;b&gt;", "powersgd:1"]
    mean = next(trace for trace in traces if trace["name"] == "ddp" and trace.get("showlegend", True))
    assert mean["x"] == [1.0, 2.0, 3.0]  # as far as both seeds went
    assert mean["y"] == [4.0, 3.0, 2.5]


def test_csv_has_one_line_per_trial() -> None:
    found = list(csv.DictReader(io.StringIO(csv_text(document()))))
    assert len(found) == 7
    assert found[0]["reached_seconds"] == "3.0"
    assert found[-1]["reached_seconds"] == ""


def test_pictures_can_be_drawn_without_any_result(tmp_path: Path) -> None:
    assert write_outputs(build_summary(TARGET, []), tmp_path) == []
    assert text(build_summary(TARGET, [])) == "no finished cells"
    draw(build_summary(TARGET, [cell("ddp", "1gbit", [None], 1.0)]), tmp_path / "one.svg")
