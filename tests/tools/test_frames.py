"""Runs and sweeps as pandas frames: every number of the files is there, and nothing else is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import oktopk
from oktopk.tools import frames, sweep
from oktopk.utils.extras import install_command
from tests.support.report_runs import write_run

pytest.importorskip("pandas")


def lines(path: Path, event: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == event]


def test_a_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=9, warmup=4, buckets=2, skipped={6: "rank 1: w"})
    run = oktopk.load_run(path)
    assert repr(run) == "<run run: 9 steps, 1 validations>"
    steps, train = lines(path, "step"), lines(path, "train")
    assert run.steps["step"].tolist() == list(range(9))
    assert run.steps["phase"].tolist() == [row["phase"] for row in steps]
    assert run.steps["skipped"].tolist() == [step == 6 for step in range(9)]
    assert run.steps["culprits"][6] == "rank 1: w"
    for name in ("sent_bytes", "payload_bytes", "local_density", "handed_over_seconds"):
        assert run.steps[name].tolist() == [row[name] for row in steps]
    for name in ("forward_seconds", "step_seconds", "exposed_seconds"):
        assert run.steps[name].tolist() == [row[name] for row in train]
    assert run.steps["loss"].isna().tolist() == [step == 6 for step in range(9)]
    assert len(run.reductions) == len(lines(path, "reduction"))
    assert set(run.reductions["bucket"]) == {0, 1}
    assert run.validations.to_dict("records") == [{"step": 9, "epoch": 0, "val loss": 6.5, "val WER": 1.25}]
    assert (run.result["finished"], run.plan["sentence"]) == (True, "a plan")
    assert run.notes == ("Values in metrics.jsonl that are not finite numbers were left out: loss (1).",)
    means = run.steps.groupby("phase")["sent_bytes"].mean()
    sparse = [row["sent_bytes"] for row in steps if row["phase"] == "sparse"]
    assert means["sparse"] == pytest.approx(sum(sparse) / len(sparse))


def test_a_run_that_is_not_whole_has_notes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=3, warmup=1)
    (path / "plan.json").unlink()
    with open(path / "metrics.jsonl", "a") as file:
        file.write("not JSON\n")
    run = oktopk.load_run(str(path))
    assert len(run.steps) == 3
    assert run.notes[0].startswith("1 lines of metrics.jsonl are not JSON objects")
    assert "There is no plan.json." in run.notes


def make_sweep(folder: Path) -> Path:
    outcomes = []
    for place, run in enumerate(sweep.plan(["dense", "oktopk"], [0.01], [0, 1])):
        write_run(folder / run.name, steps=4, warmup=4 if run.algorithm == "dense" else 1, seed=run.seed)
        result = {
            "finished": True, "steps": 4, "validations": [{"epoch": 0, "step": 4, "val loss": 2.0 + place}],
            "phases": {"sparse": {"sent_bytes": 100.0 * place, "step_seconds": 0.5}},
        }  # fmt: skip
        outcomes.append(sweep.Outcome(run, sweep.FINISHED, result=result))
    sweep.write(folder, sweep.report(outcomes))
    return folder


def test_a_sweep(tmp_path: Path) -> None:
    found = oktopk.load_sweep(make_sweep(tmp_path / "sweep"))
    assert repr(found) == "<sweep: 4 runs, 16 steps>"
    assert found.runs["run"].tolist() == ["dense-seed0", "oktopk-0.01-seed0", "dense-seed1", "oktopk-0.01-seed1"]
    assert found.runs["val loss"].tolist() == [2.0, 3.0, 4.0, 5.0]
    means = found.means.set_index("algorithm")
    assert means.loc["oktopk", "val loss mean"] == 4.0
    assert means.loc["oktopk", "val loss std"] == pytest.approx(2**0.5)
    assert means.loc["dense", "seeds"] == 2
    counts = found.steps.groupby(["algorithm", "seed", "phase"]).size()
    assert counts["oktopk", 1, "sparse"] == 3
    assert counts["dense", 0, "dense"] == 4
    assert found.steps[found.steps["algorithm"] == "dense"]["density"].isna().all()
    assert set(found.validations["run"]) == set(found.runs["run"])
    assert found.notes == {}


def test_a_folder_of_runs_without_a_sweeps_files_will_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=2, warmup=1)
    found = oktopk.load_sweep(tmp_path)
    assert found.runs["run"].tolist() == ["a", "b"]
    assert found.means.empty
    assert len(found.steps) == 4


@pytest.mark.parametrize("content", ["[]", "{", '{"runs": [3, {"run": []}], "over_seeds": [{"figures": 7}, 1]}'])
def test_a_sweeps_file_that_is_damaged_does_no_harm(content: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=2, warmup=1)
    (tmp_path / "sweep.json").write_text(content)
    assert len(oktopk.load_sweep(tmp_path).steps) == 2


def test_more_runs_than_fit_a_page_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.tools.report.analysis.runs.MOST_RUNS", 1)
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=2, warmup=1)
    assert len(oktopk.load_sweep(tmp_path).runs) == 2


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(oktopk.OkTopkError, match="is not a folder"):
        oktopk.load_run(tmp_path / "absent")
    with pytest.raises(oktopk.OkTopkError, match="no run in"):
        oktopk.load_sweep(tmp_path)
    with pytest.raises(oktopk.OkTopkError, match=r"holds 4 runs: pass one of them, or use load_sweep\(\)"):
        oktopk.load_run(make_sweep(tmp_path / "sweep"))


def test_without_pandas_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for load in (oktopk.load_run, oktopk.load_sweep):
        with pytest.raises(ImportError) as caught:
            load(tmp_path)
        assert str(caught.value) == f"frames need the package pandas: {install_command('report')}"


@pytest.mark.processes
def test_pandas_is_imported_only_when_it_is_used() -> None:
    code = "import sys, oktopk; oktopk.load_run; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert frames.load_run is oktopk.load_run
    with pytest.raises(AttributeError, match="has no attribute 'load_runs'"):
        oktopk.load_runs  # noqa: B018
