"""Real races of a tiny transformer on two ranks: every contender, resuming, interrupting, and the lab.

Ranks on loopback are forked, but for those of the command that is interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oktopk.cli import main
from oktopk.tools.lab import lab_problem
from oktopk.tools.race import run
from oktopk.tools.race.cells import CELLS, CellFolder, Finished
from oktopk.tools.race.run import run_cells
from oktopk.tools.race.spec import QUALITY, Cell, Race, Target
from oktopk.train.tasks import WORKLOADS
from tests.support.jobs import race_cell
from tests.support.jobs.race_cell import TINY
from tests.support.machine import children, heeded, spaces_of
from tests.support.worlds import is_running, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.processes, pytest.mark.usefixtures("forked_ranks")]
PATIENCE = 500
"""Seconds; a busy machine is not a bug."""
JOB = (sys.executable, race_cell.__file__)
OURS = "oktopk:density=0.1:warmup_steps=3:auto=False"
LOCAL = "local:density=0.1:warmup_steps=3:auto=False:average_state_every=2"
CONFIG: Mapping[str, Any] = {
    "dnn": TINY,
    "lr": 0.01,
    "batch_size": 4,
    "max_epochs": 1,
    "weight_decay": 0.1,
    "clip": 1.0,
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, TINY, race_cell.tiny_workload())
    monkeypatch.setattr(run, "JOB", JOB)


def one_cell(out: Path, name: str, race: Race, *fail: str, kind: str = QUALITY) -> Finished | list[run.Failure]:
    """Run one cell on loopback; returns it, or its failure."""
    cell = Cell(name, "none", 0, kind)
    job = [*JOB, *(["--fail", name, *fail] if fail else [])]
    failures = run_cells(race, [cell], out, PATIENCE, lambda line: None, job=job)
    return failures or CellFolder(out / CELLS / cell.name).read()


def test_a_race_of_every_kind_of_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["ddp", "powersgd:1:start=3", "accumulate:2", OURS, LOCAL]
    words = ["race", "--out", str(tmp_path), "--link", "none", "--contenders", ",".join(names), "--json"]
    words += ["--target", "val loss<=0.01", "--steps", "6", "--val-every-steps", "2", "--", "--dnn", TINY]
    assert main([*words, "--lr", "0.01"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    rows = {row["contender"]: row for row in document["rows"]}
    assert set(rows) == set(names)
    trials = {trial["contender"]: trial for trial in document["trials"]}
    for name, trial in trials.items():
        assert [point["step"] for point in trial["curve"]] == [0, 2, 4, 6], name
        assert trial["ended"] == "limit"  # a target that is never reached is no error
        losses = [point["metrics"]["val loss"] for point in trial["curve"]]
        assert losses[-1] < losses[0], name
        steps = CellFolder(tmp_path / CELLS / Cell(name, "none", 0).name).read().steps
        assert sum(step.seconds for step in steps) == pytest.approx(trial["curve"][-1]["seconds"])
    assert all(one["seconds"] is None for one in rows.values())
    start = {trial["curve"][0]["metrics"]["val loss"] for trial in trials.values()}
    assert len(start) == 1  # all of them begin with the same weights
    assert [list(trials[name]["phases"]) for name in names] == [
        ["dense"], ["dense", "low-rank"], ["dense"], ["dense", "sparse"], ["dense", "sparse"],
    ]  # fmt: skip
    assert trials[OURS]["phases"]["dense"]["steps"] == 3
    # With the same seed, dense steps of ours are those of DDP; two batches per step are another run.
    assert trials[OURS]["curve"][1]["metrics"] == trials["ddp"]["curve"][1]["metrics"]
    assert trials["accumulate:2"]["curve"][1]["metrics"] != trials["ddp"]["curve"][1]["metrics"]
    assert rows[OURS]["of_dense"] < rows["ddp"]["of_dense"] == pytest.approx(1.0)
    assert rows[OURS]["of_dense"] + 0.4 < rows[LOCAL]["of_dense"]  # which has averaged its moments three times
    assert rows["powersgd:1:start=3"]["of_dense"] < 0.9
    assert {path.name for path in tmp_path.iterdir()} >= {"race.json", "race.csv", "race.html", "race.svg"}


def test_a_race_of_sharded_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "density=0.1:warmup_steps=2"
    names = ["ddp", "hsdp-native:2", f"hsdp:2:auto=False:{settings}", f"local:shards=2:auto=False:{settings}"]
    words = ["race", "--out", str(tmp_path), "--link", "none", "--ranks", "4", "--json", "--steps", "4"]
    words += ["--contenders", ",".join(names), "--val-every-steps", "2", "--target", "val loss<=0.01", "--"]
    assert main([*words, "--dnn", TINY, "--lr", "0.01"]) == 0
    trials = {trial["contender"]: trial for trial in json.loads(capsys.readouterr().out)["trials"]}
    assert [list(trials[name]["phases"]) for name in names] == [["dense"]] * 2 + [["dense", "sparse"]] * 2
    for name, trial in trials.items():
        losses = [point["metrics"]["val loss"] for point in trial["curve"]]
        assert losses[0] == pytest.approx(trials["ddp"]["curve"][0]["metrics"]["val loss"], rel=1e-6), name
        assert losses[-1] < losses[0], name
    dense = trials["ddp"]["curve"][1]["metrics"]["val loss"]
    for name in names[1:3]:  # two dense steps; those of a local optimizer are other steps
        assert trials[name]["curve"][1]["metrics"]["val loss"] == pytest.approx(dense, rel=1e-4), name


@pytest.mark.parametrize("name", [OURS, LOCAL])
def test_a_cell_that_resumes_in_its_middle_has_the_same_curve(tmp_path: Path, name: str) -> None:
    race = Race(CONFIG, steps=9, val_every=3, target=Target("val loss", 0.01), save_seconds=0.0)
    whole = one_cell(tmp_path / "whole", name, race)
    assert isinstance(whole, Finished)
    failed = one_cell(tmp_path / "parts", name, race, "5")
    assert isinstance(failed, list)
    assert "asked to fail after step 5" in failed[0].problem
    folder = tmp_path / "parts" / CELLS / Cell(name, "none", 0, QUALITY).name
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000005"]
    parts = one_cell(tmp_path / "parts", name, race)
    assert isinstance(parts, Finished)
    assert [(p.step, p.metrics, p.loss) for p in parts.curve] == [(p.step, p.metrics, p.loss) for p in whole.curve]
    assert [(s.step, s.phase) for s in parts.steps] == [(s.step, s.phase) for s in whole.steps]
    assert parts.curve[-1].seconds == pytest.approx(sum(step.seconds for step in parts.steps))
    assert not (folder / "checkpoints").exists()


def test_power_sgd_saves_nothing_because_its_errors_belong_to_buckets(tmp_path: Path) -> None:
    race = Race(CONFIG, steps=4, val_every=2, save_seconds=0.0)
    assert isinstance(one_cell(tmp_path, "powersgd:2:start=2", race, "3"), list)
    assert not (tmp_path / CELLS / Cell("powersgd:2:start=2", "none", 0, QUALITY).name / "checkpoints").exists()


def test_a_target_that_is_reached_ends_a_cell_at_once(tmp_path: Path) -> None:
    """That --seconds ends one by the clock is seen in tests/cli/test_demo.py."""
    race = Race(CONFIG, steps=50, val_every=1, target=Target("val loss", 1e9))
    reached = one_cell(tmp_path / "target", "ddp", race)
    assert isinstance(reached, Finished)
    assert (reached.result["ended"], reached.result["steps"]) == ("target", 0)


def test_interrupting_leaves_no_process_and_keeps_finished_cells(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--link", "none", "--contenders", "ddp", "--config", "gpt_race"]
    command = [sys.executable, "-m", "oktopk", "race", *words, "--seconds", "100000", "--", "--batch-size", "1"]
    with heeded(signal.SIGINT):
        race = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert wait_until(lambda: len(children(race.pid)) >= 2, PATIENCE)
        ranks = children(race.pid)
        race.send_signal(signal.SIGINT)
        _, err = race.communicate(timeout=PATIENCE)
    finally:
        race.kill()
        race.wait()
    assert race.returncode == 130
    assert b"the same command continues the race" in err
    assert wait_until(lambda: not any(map(is_running, ranks)), PATIENCE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contenders", "oktop"], "did you mean 'oktopk'?"),
        (["--link", "fast"], "--link: rate must be like 100mbit"),
        (["--target", "val loss=2"], "like 'val loss<=1.90'"),
        (["--ranks", "1"], "one rank has nothing to send"),
        (["--composed", "--target", "val loss<=1"], "auto of oktopk chooses by the link"),
        (
            ["--composed", "--target", "val loss<=1", "--contenders", "oktopk:auto=False:density=auto"],
            "chooses by the link",
        ),
        (["--composed", "--contenders", "ddp", "--seconds", "9"], "leave out --seconds"),
        (["--seeds", "x"], "--seeds must be"),
        (["--steps", "0"], "--steps must be above 0"),
        (["--", "--density", "0.1"], "--density after --: the race or its contenders set it"),
        (["--", "--data-dir", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["--config", "gpt_rase"], "no config 'gpt_rase'"),
    ],
)
def test_bad_input_is_a_sentence_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    more = words if "--" in words else [*words, "--"]
    config = [] if "--config" in words else ["--dnn", TINY]
    assert main(["race", "--out", str(tmp_path), "--link", "none", *more, *config]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_composed_and_full_cells_over_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if problem := lab_problem():
        pytest.skip(problem)
    words = ["race", "--out", str(tmp_path), "--link", "20mbit", "--contenders", f"ddp,{OURS}", "--steps", "6"]
    words += ["--val-every-steps", "2", "--target", "val loss<=3.2", "--json", "--timing-steps", "8"]
    task = ["--", "--dnn", TINY, "--lr", "0.01", "--lr-schedule", "constant"]
    assert main([*words, "--composed", *task]) == 0
    composed = json.loads(capsys.readouterr().out)
    assert {(row["link"], row["how"]) for row in composed["rows"]} == {("20mbit", "composed")}
    assert main([*words, *task]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["how"] for row in document["rows"]} == {"full", "composed"}
    assert {one["contender"] for one in document["deviations"]} == {"ddp", OURS}
    for row in document["rows"]:
        if row["contender"] == "ddp":
            assert 1.0 < row["of_dense"] < 1.5, row  # with headers, as the kernel counts them
    assert not spaces_of(os.getpid())
