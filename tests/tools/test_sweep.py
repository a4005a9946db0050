"""oktopk sweep: which runs it does, which it does not repeat, and what comes of them. Most are a script."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli import main
from oktopk.cli.commands.sweep import text
from oktopk.tools import sweep
from oktopk.tools.sweep import FAILED, FINISHED, INTERRUPTED, NOT_BEGUN, Run, plan, report, run_all

CHILD = """
import argparse, json, os, pathlib, signal, sys, time
said = argparse.ArgumentParser()
for name in ("out", "compressor", "density", "seed", "fail", "hold"):
    said.add_argument("--" + name)
said.add_argument("--resume", action="store_true")
said = said.parse_args()
out = pathlib.Path(said.out)
out.mkdir(parents=True, exist_ok=True)
with open(out.parent / "calls.txt", "a") as calls:
    print(*sys.argv[1:], file=calls)
(out / "config.toml").write_text("")
phase = "dense" if said.compressor == "dense" else "sparse"
seed = int(said.seed)
row = {"finished": True, "algorithm": said.compressor, "density": float(said.density or 0.01), "seed": seed,
       "steps": 10 + seed, "phases": {"dense": {"sent_bytes": 800.0, "step_seconds": 0.5}},
       "validations": [{"epoch": 0, "step": 1, "val loss": 99.0}, {"epoch": 4, "step": 9, "val loss": 2.0 + seed}]}
row["phases"][phase] = {"sent_bytes": 8.0 + seed, "step_seconds": 0.25}
def stopped(number, _):
    (out / "result.json").write_text(json.dumps(row | {"finished": False, "saved": True}))
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stopped)
signal.signal(signal.SIGTERM, stopped)
if said.hold and said.hold.startswith(said.compressor):
    # As a terminal does it: the signal goes to the whole group, in which a run must not be.
    row["alone"] = os.getpgrp() != os.getpgid(os.getppid())
    os.kill(os.getppid(), int(said.hold.split(":")[1]))
    time.sleep(60)
if said.fail == said.compressor:
    sys.exit(3)
(out / "result.json").write_text(json.dumps(row))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "child.py").write_text(CHILD)
    return [sys.executable, str(tmp_path / "child.py")]


def calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def statuses(outcomes: Sequence[sweep.Outcome]) -> dict[str, str]:
    return {outcome.run.name: outcome.status for outcome in outcomes}


def test_density_means_nothing_to_dense_and_nothing_is_done_twice() -> None:
    runs = plan(["dense", "oktopk", "dense"], [0.01, 0.02, 0.010], [0, 1])
    assert runs == [
        *(Run("dense", None, 0), Run("oktopk", 0.01, 0), Run("oktopk", 0.02, 0)),
        *(Run("dense", None, 1), Run("oktopk", 0.01, 1), Run("oktopk", 0.02, 1)),
    ]
    assert Run("dense", None, 0).options() == ["--compressor", "dense", "--seed", "0"]
    assert len({run.name for run in plan(["oktopk"], [1e-7, 1.0000001e-7], [0])}) == 2


def test_every_run_gets_its_turn_once(tmp_path: Path, command: list[str]) -> None:
    folder = tmp_path / "sweep"
    runs = plan(["dense", "oktopk"], [0.01], [0, 1])
    heard: list[list[str]] = []
    outcomes, ended_by = run_all(
        runs, folder, [], command, lambda known: heard.append([outcome.status for outcome in known])
    )
    assert ended_by is None
    assert set(statuses(outcomes).values()) == {FINISHED}
    assert calls(folder) == [f"--out {folder / run.name} {' '.join(run.options())}" for run in runs]
    assert [known.count(FINISHED) for known in heard] == [0, 1, 2, 3, 4]
    again, _ = run_all([*runs, Run("topka", 0.01, 0)], folder, [], command)
    assert set(statuses(again).values()) == {FINISHED}
    assert [call.split()[1] for call in calls(folder)[4:]] == [str(folder / "topka-0.01-seed0")]


def test_a_failure_is_noted_the_others_go_on_and_next_time_it_is_resumed(
    tmp_path: Path, command: list[str]
) -> None:
    folder, runs = tmp_path / "sweep", plan(["dense", "oktopk", "topka"], [0.01], [0])
    outcomes, _ = run_all(runs, folder, ["--fail", "oktopk"], command)
    assert [outcome.status for outcome in outcomes] == [FINISHED, FAILED, FINISHED]
    assert outcomes[1].problem == "ended with code 3"
    assert "oktopk-0.01-seed0: ended with code 3" in text(report(outcomes))
    outcomes, _ = run_all(runs, folder, [], command)
    assert set(statuses(outcomes).values()) == {FINISHED}
    assert len(calls(folder)) == 4
    assert calls(folder)[-1].startswith(f"--out {folder / 'oktopk-0.01-seed0'} --resume ")


def test_an_unfinished_result_is_no_result(tmp_path: Path, command: list[str]) -> None:
    run = Run("oktopk", 0.01, 0)
    run_all([run], tmp_path, [], command)
    path = tmp_path / run.name / "result.json"
    path.write_text(path.read_text().replace('"finished": true', '"finished": false'))
    outcomes, _ = run_all([run], tmp_path, [], command)
    assert statuses(outcomes) == {run.name: FINISHED}
    assert len(calls(tmp_path)) == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"algorithm": "oktopk", "density": 0.5, "seed": 0, "finished": true}', "another run, with density 0.5"),
        ("{", "cannot be read"),
    ],
)
def test_a_folder_of_something_else_is_left_alone(
    content: str, complaint: str, tmp_path: Path, command: list[str]
) -> None:
    runs = plan(["oktopk"], [0.01], [0, 1])
    path = tmp_path / runs[0].name / "result.json"
    path.parent.mkdir()
    path.write_text(content)
    outcomes, _ = run_all(runs, tmp_path, [], command)
    assert [outcome.status for outcome in outcomes] == [FAILED, FINISHED]
    assert complaint in str(outcomes[0].problem)
    assert path.read_text() == content
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_run_save_itself_and_ends_the_sweep(
    number: signal.Signals, tmp_path: Path, command: list[str]
) -> None:
    before = signal.getsignal(number)
    runs = plan(["dense", "oktopk", "topka"], [0.01], [0])
    outcomes, ended_by = run_all(runs, tmp_path, ["--hold", f"oktopk:{int(number)}"], command)
    assert ended_by is number
    assert [outcome.status for outcome in outcomes] == [FINISHED, INTERRUPTED, NOT_BEGUN]
    saved = outcomes[1].result
    assert saved is not None
    assert saved["saved"]
    assert saved["alone"]
    assert len(calls(tmp_path)) == 2
    assert signal.getsignal(number) == before


def known(tmp_path: Path, command: list[str], seeds: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    outcomes, _ = run_all(plan(["dense", "oktopk"], [0.01], seeds), tmp_path / "sweep", [], command)
    return report(outcomes, ["--lr", "1"])


def test_figures_are_of_the_last_validation_and_the_sparse_phase(tmp_path: Path, command: list[str]) -> None:
    dense, oktopk = known(tmp_path, command, [1])["runs"]
    assert (dense["phase"], dense["sent_bytes"], dense["step_ms"], dense["density"]) == ("dense", 9.0, 250.0, None)
    assert (oktopk["phase"], oktopk["sent_bytes"], oktopk["steps"], oktopk["val loss"]) == ("sparse", 9.0, 11, 3.0)
    assert "epoch" not in oktopk


def test_means_and_spread_are_over_the_finished_seeds(tmp_path: Path, command: list[str]) -> None:
    rows = known(tmp_path, command)["runs"]
    rows[-1]["status"] = FAILED
    dense, oktopk = sweep.over_seeds(rows)
    assert (dense["seeds"], oktopk["seeds"]) == (3, 2)
    assert dense["figures"]["val loss"] == {"mean": 3.0, "std": 1.0}
    assert oktopk["figures"]["val loss"] == {"mean": 2.5, "std": statistics.stdev([2.0, 3.0])}
    (alone,) = sweep.over_seeds(rows[:1])
    assert alone["figures"]["val loss"] == {"mean": 2.0, "std": None}


def test_the_table(tmp_path: Path, command: list[str]) -> None:
    lines = [line.split() for line in text(known(tmp_path, command)).splitlines()]
    assert lines[1] == ["dense", "–", "0", "finished", "10", "dense", "2.0000", "8", "250.0"]
    assert lines[2] == ["oktopk", "0.01", "0", "finished", "10", "sparse", "2.0000", "8", "250.0"]
    mean = ["3.0000", "±", "1.0000", "9", "±", "1", "250.0", "±", "0.0"]
    assert lines[-1] == ["oktopk", "0.01", "3", "sparse", *mean]


def test_the_files(tmp_path: Path, command: list[str]) -> None:
    content = known(tmp_path, command)
    content["runs"].append(sweep.make_row(sweep.Outcome(Run("topka", 0.01, 0))))
    sweep.write(tmp_path / "new", content)
    assert json.loads((tmp_path / "new" / "sweep.json").read_text()) == content
    with open(tmp_path / "new" / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [row["run"] for row in content["runs"]]
    assert rows[1]["val loss"] == "2.0"
    assert rows[-1]["status"] == NOT_BEGUN
    names = ["sweep.csv", "sweep.json", "sweep_means.csv"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names


def test_the_means_over_seeds_are_a_table_too(tmp_path: Path, command: list[str]) -> None:
    content = known(tmp_path, command)
    sweep.write(tmp_path / "new", content)
    with open(tmp_path / "new" / "sweep_means.csv", newline="") as file:
        dense, oktopk = csv.DictReader(file)
    assert (dense["algorithm"], dense["density"], dense["phase"], dense["seeds"]) == ("dense", "", "dense", "3")
    assert (oktopk["algorithm"], oktopk["density"], oktopk["phase"], oktopk["seeds"]) == (
        *("oktopk", "0.01", "sparse", "3"),
    )
    for row, group in zip((dense, oktopk), content["over_seeds"], strict=True):
        assert float(row["val loss mean"]) == group["figures"]["val loss"]["mean"] == 3.0
        assert float(row["val loss std"]) == 1.0
        assert float(row["step_ms mean"]) == 250.0
    runs = [row for row in content["runs"] if row["algorithm"] == "oktopk"]
    assert float(oktopk["sent_bytes mean"]) == statistics.fmean(row["sent_bytes"] for row in runs)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--algorithms", "zip"], "--algorithms must be one of dense"),
        (["--densities", "0:dense,128:0.01"], "--densities takes numbers and auto, got 0:dense"),
        (["--densities", "0.01,2"], "--densities must be a number above 0 up to 1, or auto, got '2'"),
        (["--seeds", ","], "--seeds needs at least one value"),
        (["--", "--seed", "3"], "--seed after --: the sweep sets it"),
        (["--", "--resume"], "--resume after --: the sweep sets it"),
        (["--", "--override"], "--override after --: the sweep sets it"),
        (["--", "--lr", "x"], "lr must be"),
        (["--ranks", "0"], "ranks must be"),
    ],
)
def test_mistakes_are_named_before_the_first_run(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--out", str(tmp_path / "sweep"), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_two_sweeps_into_one_folder_the_second_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run_all(*arguments: object, **keywords: object) -> tuple[list[sweep.Outcome], None]:
        """While the first is under way, the second comes."""
        if not started:
            started.append("the first")
            assert main(["sweep", "--out", str(tmp_path / "sweep")]) == 1
        else:
            started.append("another")
        return [], None

    monkeypatch.setattr(sweep, "run_all", run_all)
    main(["sweep", "--out", str(tmp_path / "sweep")])
    assert started == ["the first"]
    said = capsys.readouterr().err
    assert f"oktopk sweep: error: {tmp_path / 'sweep'} is in use by process {os.getpid()} on " in said
    main(["sweep", "--out", str(tmp_path / "sweep")])
    assert started == ["the first", "another"]


def test_compression_that_is_off_would_make_all_runs_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OKTOPK_COMPRESSION", "False")
    assert main(["sweep", "--out", str(tmp_path)]) == 2
    assert "environment OKTOPK_COMPRESSION" in capsys.readouterr().err


def test_runs_with_other_options_are_not_mixed(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.write(tmp_path / "sweep", known(tmp_path, command))
    assert main(["sweep", "--out", str(tmp_path / "sweep"), "--", "--lr", "2"]) == 2
    assert "holds a sweep with other options (--lr 1)" in capsys.readouterr().err


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run; then a sweep that has one more, and does not repeat the first."""
    folder = tmp_path / "sweep"
    train = ["--dnn", "lstman4-small", "--max_steps", "2", "--batch-size", "2", "--warmup-steps", "1"]
    words = [
        "sweep",
        "--out",
        str(folder),
        "--algorithms",
        "oktopk",
        "--densities",
        "0.05",
        "--json",
        "--",
        *train,
    ]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["run"], row["status"], row["steps"], row["phase"]) == ("oktopk-0.05-seed0", FINISHED, 2, "sparse")
    assert row["val loss"] > 0
    assert row["step_ms"] > 0
    assert json.loads((folder / "sweep.json").read_text())["runs"] == [row]
    log = folder / "oktopk-0.05-seed0" / "train.log"
    before = log.read_bytes()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [row]
    assert log.read_bytes() == before
