"""The headline of a page: true of runs that saved nothing, never were sparse, failed, or left damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.tools.report import build_report, read_run
from oktopk.tools.report.html.groups import group_runs
from oktopk.tools.report.html.page import contents
from oktopk.tools.report.html.sweep import sweep_tiles
from oktopk.tools.report.html.tiles import Tile, run_tiles
from tests.support.report_runs import write_run, write_steps


def tiles(folder: Path) -> dict[str, Tile]:
    return {tile.label: tile for tile in run_tiles(build_report([read_run(folder, "run")])["runs"][0])}


def keep_events(folder: Path, *events: str) -> Path:
    """Drop all other lines."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["event"] in events))
    return folder


def slow_down(folder: Path, factor: float, *parts: str) -> Path:
    """Make sparse steps this much longer, and these parts of them."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["event"] == "train" and row["phase"] == "sparse":
            for name in ("step_seconds", *parts):
                row[name] *= factor
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_sparse_run_has_what_it_sent_and_how_long_it_took(tmp_path: Path) -> None:
    found = tiles(slow_down(write_run(tmp_path), 2.0))
    assert found["Bytes against dense"].value == "13× fewer"  # 832 B of 10,667
    assert "38.5 % over all steps" in found["Bytes against dense"].detail
    assert found["Step time against dense"].value == "2.0× slower"
    assert found["Step time against dense"].tone == "bad"
    assert (found["val WER"].value, found["val WER"].tone) == ("1.25", "plain")
    assert found["Dense or sparse"].value == "sparse since step 8"
    assert "16 of 24 steps" in found["Dense or sparse"].detail


def test_a_machine_that_became_busier_is_not_blamed_on_compression(tmp_path: Path) -> None:
    found = tiles(slow_down(write_run(tmp_path), 2.0, "forward_seconds", "backward_seconds"))
    assert found["Step time against dense"].tone == "plain"
    assert "Forward and backward alone took 2.4 s and 1.2 s" in found["Step time against dense"].detail


@pytest.mark.parametrize(("finished", "value"), [(True, "never sparse"), (False, "dense so far")])
def test_a_run_without_sparse_steps_claims_no_gain(tmp_path: Path, finished: bool, value: str) -> None:
    found = tiles(write_run(tmp_path, steps=5, warmup=9, algorithm="oktopk", finished=finished))
    assert found["Bytes against dense"].value == "no saving"
    assert found["Step time against dense"].value == "1.5 s"
    assert found["Dense or sparse"].value == value
    assert not any(tile.tone == "good" for tile in found.values())


def test_one_rank_saves_nothing(tmp_path: Path) -> None:
    found = tiles(write_run(tmp_path, world=1))
    assert found["Bytes against dense"].value == "nothing sent"
    assert "rank 0 selected" in found["Dense or sparse"].detail


def test_a_run_that_goes_back_to_dense_says_who_decided(tmp_path: Path) -> None:
    write_run(tmp_path, steps=12, warmup=4)
    write_steps(tmp_path, 12, 20, warmup=99, world=3, buckets=2)
    sent = tiles(tmp_path)["Bytes against dense"]
    assert sent.value == "1.58× fewer"  # 12 steps of 10,667 B and 8 of 832: no more than the run saved
    assert "8 of 20 were sparse" in sent.detail
    assert "Step time against dense" not in tiles(tmp_path)  # it is that of the steps it went back from
    assert tiles(tmp_path)["Dense or sparse"].value == "dense since step 12"
    assert "auto or a schedule" in tiles(tmp_path)["Dense or sparse"].detail
    (tmp_path / "config.toml").write_text('dnn = "net"  # x\nauto = true  # command line\n')
    assert tiles(tmp_path)["What auto decided"].detail == "8 of 20 steps were sparse: auto found dense faster."


def test_a_script_without_losses_and_times_has_what_the_sink_wrote(tmp_path: Path) -> None:
    keep_events(write_run(tmp_path), "reduction", "step")
    for name in ("plan.json", "result.json", "config.toml"):
        (tmp_path / name).unlink()
    found = tiles(tmp_path)
    assert found["Bytes against dense"].value == "13× fewer"  # than its own dense steps
    assert found["Step time against dense"].value == found["Quality"].value == "not known"
    page = contents(build_report([read_run(tmp_path, "run")]))
    assert "finished" not in page.parts["r0-about"]


def test_without_validation_the_loss_is_the_quality(tmp_path: Path) -> None:
    found = tiles(keep_events(write_run(tmp_path), "reduction", "step", "train"))
    assert found["Training loss"].value == "6.775"
    assert "no validation" in found["Training loss"].detail


def test_skipped_steps_are_in_the_headline(tmp_path: Path) -> None:
    assert tiles(write_run(tmp_path, skipped={9: "rank 1: w", 10: "loss"}))["Skipped steps"].value == "2"


@given(st.data())
def test_any_part_of_the_files_makes_a_headline(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut files in two, leave lines out: what remains is shown, and never as less or more than it was."""
    folder = write_run(tmp_path_factory.mktemp("run"), steps=8, warmup=data.draw(st.sampled_from([0, 3, 8])))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = data.draw(st.lists(st.sampled_from(lines), max_size=12))
    end = data.draw(st.integers(0, len(lines[-1])))
    (folder / "metrics.jsonl").write_text("".join(kept) + lines[-1][:end])
    for name in data.draw(st.sets(st.sampled_from(["plan.json", "result.json", "config.toml"]))):
        (folder / name).unlink()
    document = build_report([read_run(folder, "run")])
    made = {tile.label: tile for tile in run_tiles(document["runs"][0])}
    assert contents(document).body
    phases = document["runs"][0]["phases"]
    if "sparse" not in phases:
        assert "fewer" not in "".join(tile.value for tile in made.values())
    if "Step time against dense" in made and "er" in made["Step time against dense"].value:
        assert {name for name, means in phases.items() if means["step_seconds"]} == {"dense", "sparse"}


def sweep(folder: Path, **runs: dict[str, Any]) -> dict[str, Any]:
    for name, options in runs.items():
        write_run(folder / name, steps=12, warmup=0 if options["algorithm"] != "dense" else 12, **options)
        config = "".join(
            f"{key} = {options[key]!r}  # x\n" for key in ("algorithm", "seed", "lr") if key in options
        )
        (folder / name / "config.toml").write_text(config)
    return build_report([read_run(folder / name, name) for name in runs])


DENSE0, DENSE1 = ({"algorithm": "dense", "seed": seed} for seed in (0, 1))
OURS0, OURS1 = ({"algorithm": "oktopk", "seed": seed, "density": 0.01} for seed in (0, 1))


def test_runs_that_differ_in_their_seed_are_one_setting(tmp_path: Path) -> None:
    document = sweep(tmp_path, a=DENSE0, b=OURS0, c=DENSE1, d=OURS1, e=OURS0 | {"density": 0.05})
    groups = group_runs(document["runs"])
    assert [(group.name, len(group.runs)) for group in groups] == [("dense", 2), ("oktopk, 1 %", 2), ("e", 1)]
    assert groups[1].colour != groups[0].colour
    assert (groups[1].dash, groups[2].dash) == ("solid", "dash")
    values = {tile.label: tile for tile in sweep_tiles(document)}
    assert values["Fewest bytes against dense"].value == "13× fewer"
    assert values["Runs"].value == "5 of 5 finished"


@pytest.mark.parametrize("other", [OURS0, OURS1 | {"lr": 0.5}, OURS1 | {"seed": None}])
def test_runs_that_differ_in_more_are_not_averaged(tmp_path: Path, other: dict[str, Any]) -> None:
    document = sweep(tmp_path, a=OURS0, b=other)
    assert [group.name for group in group_runs(document["runs"])] == ["a", "b"]


def test_a_setting_that_has_not_finished_takes_no_part(tmp_path: Path) -> None:
    document = sweep(tmp_path, a=DENSE0, b=OURS0, c=OURS1 | {"finished": False, "density": 0.02})
    values = {tile.label: tile for tile in sweep_tiles(document)}
    assert values["Fewest bytes against dense"].detail.startswith("b: ")
    assert values["Runs"].tone == "bad"


def test_times_within_the_spread_of_seeds_are_no_difference(tmp_path: Path) -> None:
    runs = sweep(tmp_path, a=DENSE0, b=DENSE1, c=OURS0, d=OURS1)
    for row, seconds in zip(runs["finals"], (1.0, 2.0, 1.0, 1.2), strict=True):
        row["step_seconds"] = seconds
    assert {tile.label: tile for tile in sweep_tiles(runs)}[
        "Fastest step against dense"
    ].value == "no clear difference"
    for row, seconds in zip(runs["finals"], (2.0, 2.0, 1.0, 1.0), strict=True):
        row["step_seconds"] = seconds
    assert {tile.label: tile for tile in sweep_tiles(runs)}["Fastest step against dense"].value == "2.0× faster"
