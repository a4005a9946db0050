"""Cells are kept, skipped, refused and repeated; a failing one loses nothing. Their job only writes files."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from oktopk.tools.race.cells import CELLS, CellFolder, Point, Step, find_finished
from oktopk.tools.race.run import Failure, plan_cells, run_cells
from oktopk.tools.race.spec import Cell, Race, RaceError, Spec, Target
from oktopk.utils.signals import Interrupted

pytestmark = pytest.mark.processes
RACE = Race({"dnn": "nothing", "lr": 0.1}, ranks=2, steps=3, target=Target("val loss", 1.0))
JOB = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1])
spec = json.loads((folder / "spec.json").read_text())
name = spec["cell"]["contender"]
if os.environ["RANK"] != "0":
    sys.exit(0)
with open(folder.parent.parent / "calls.txt", "a") as calls:
    print(name, file=calls)
if name == "accumulate:9":
    sys.exit("ValueError: the data is missing")
if name == "accumulate:8":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
point = {"step": 3, "seconds": 6.0, "sent_bytes": 30.0, "metrics": {"val loss": 0.5}, "loss": None}
(folder / "curve.jsonl").write_text(json.dumps(point) + "\\n")
rows = [f"{step},dense,2.0,10.0" for step in (1, 2, 3)]
(folder / "steps.csv").write_text("\\n".join(["step,phase,seconds,sent_bytes", *rows]) + "\\n")
result = {"ended": "target", "steps": 3, "parameters": 10, "metric": "val loss"}
if name != "accumulate:7":
    (folder / "result.json").write_text(json.dumps(result))
"""


class Told:
    """The race in a folder, and what it said."""

    def __init__(self, out: Path) -> None:
        self.out, self.lines = out, list[str]()
        (out / "job.py").write_text(JOB)

    def run(self, *names: str, race: Race = RACE) -> list[Failure]:
        self.lines.clear()
        job = [sys.executable, str(self.out / "job.py")]
        return run_cells(race, plan_cells(names, ["none"], [0]), self.out, 60, self.lines.append, job=job)

    @property
    def calls(self) -> list[str]:
        return (self.out / "calls.txt").read_text().split()

    def folder(self, name: str) -> Path:
        return self.out / CELLS / Cell(name, "none", 0).name


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_finished_cell_is_kept_and_skipped(told: Told) -> None:
    assert told.run("ddp", "oktopk") == []
    before = (told.folder("ddp") / "result.json").stat().st_mtime_ns
    assert told.run("ddp", "oktopk", "topka") == []
    assert told.calls == ["ddp", "oktopk", "topka"]
    assert [line.endswith("finished before") for line in told.lines] == [True, True, False]
    assert (told.folder("ddp") / "result.json").stat().st_mtime_ns == before


def test_a_failing_cell_keeps_its_error_and_the_race_goes_on(told: Told) -> None:
    failures = told.run("ddp", "accumulate:9", "accumulate:7", "topka")
    assert [one.cell.contender for one in failures] == ["accumulate:9", "accumulate:7"]
    assert failures[0].problem == "ValueError: the data is missing"
    assert "result.json cannot be read" in failures[1].problem
    assert "rank 0 ended with exit code 1" in (told.folder("accumulate:9") / "error.txt").read_text()
    assert [cell.spec.cell.contender for cell in find_finished(told.out)[0]] == ["ddp", "topka"]
    told.run("ddp", "accumulate:9")
    assert told.calls.count("accumulate:9") == 2  # a failed cell is repeated
    assert told.calls.count("ddp") == 1


def test_another_race_in_the_same_folder_is_refused(told: Told) -> None:
    told.run("ddp")
    for race, said in (
        (Race(RACE.config, 2, 3, target=Target("val loss", 0.9)), "--target is val loss <= 1 there and val"),
        (Race({**RACE.config, "lr": 0.2}, 2, 3, target=RACE.target), "--lr is 0.1 there and 0.2 here"),
        (Race(RACE.config, 4, 3, target=RACE.target), "--ranks is 2 there and 4 here"),
        (Race(RACE.config, 2, target=RACE.target), "--steps is 3 there and not set here"),
        (Race(RACE.config, 2, 3, target=RACE.target, val_every=9), "--val-every-steps is 50 there and 9 here"),
    ):  # fmt: skip
        with pytest.raises(RaceError) as caught:
            told.run("topka", race=race)
        assert said in str(caught.value)
    assert told.calls == ["ddp"]


def test_damaged_cells_are_named_and_do_not_hide_the_others(told: Told) -> None:
    told.run("ddp", "topka", "oktopk")
    (told.folder("ddp") / "curve.jsonl").write_text('{"step": 1}\n')
    (told.folder("topka") / "result.json").write_text("[]")
    cells, problems = find_finished(told.out)
    assert [cell.spec.cell.contender for cell in cells] == ["oktopk"]
    assert all("remove" in problem for problem in problems)
    assert len(problems) == 2
    assert [one.cell.contender for one in told.run("ddp", "topka", "oktopk")] == ["ddp", "topka"]


def test_a_signal_ends_the_race_and_the_same_call_continues_it(told: Told) -> None:
    with pytest.raises(Interrupted) as caught:
        told.run("ddp", "accumulate:8", "topka")
    assert caught.value.number == signal.SIGTERM
    assert told.calls == ["ddp", "accumulate:8"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL or os.environ.get("PYTEST_XDIST_WORKER")
    told.run("ddp", "topka")
    assert told.calls == ["ddp", "accumulate:8", "topka"]


def test_files_continue_after_the_step_of_a_checkpoint(tmp_path: Path) -> None:
    folder, spec = CellFolder(tmp_path), Spec(RACE, Cell("ddp", "none", 0))
    assert not folder.prepare(spec)
    folder.open(0)
    for number in (1, 2, 3):
        folder.add_step(Step(number, "dense", 1.0, 2.0))
        folder.add_point(Point(number, float(number), 2.0 * number, {"val loss": float("nan")}))
    folder.close()
    again = CellFolder(tmp_path)
    again.open(2)
    again.add_step(Step(3, "sparse", 5.0, 1.0))
    again.finish({"ended": "limit"})
    found = again.read()
    assert [(step.step, step.phase) for step in found.steps] == [(1, "dense"), (2, "dense"), (3, "sparse")]
    assert [point.step for point in found.curve] == [1, 2]
    assert found.curve[0].metrics == {"val loss": None}  # JSON has no NaN
    assert json.loads((tmp_path / "result.json").read_text()) == {"ended": "limit"}
    assert again.prepare(spec)
