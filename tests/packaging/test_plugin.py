"""The package in examples/plugin, installed by pip as anybody's would be: every command takes its names.

Where it makes no difference, the processes of a command are forked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oktopk.tools.lab import lab_problem
from tests.support.forked import run_command
from tests.support.paths import ROOT

SECONDS = 300
"""For one command; a busy machine is not a bug."""
pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * SECONDS)]
TINY = ("--batch-size", "64", "--max-epochs", "1", "--max-steps", "12", "--lr", "0.05")
SPARSE = ("--warmup-steps", "4", "--density", "0.1")


def call(command: Sequence[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the package to, without the network."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(
        ROOT / "examples" / "plugin", folder / "source", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = call([*pip, "--disable-pip-version-check", "--target", str(folder / "site"), str(source)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "site" / "oktopk_example.py").exists()
    return folder / "site"


def oktopk(site: Path, folder: Path, *words: str) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "oktopk", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    done = run_command(command, folder, env, SECONDS)
    assert done.returncode == 0, f"oktopk {' '.join(words)}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def rows(path: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if row["event"] == event]


def test_train_with_all_four(site: Path, tmp_path: Path) -> None:
    names = ("--dnn", "wave", "--compressor", "randomk", "--values", "int8", "--sinks", "lines,csv")
    words = ("train", *names, *TINY, *SPARSE, "--ranks", "2", "--out", "run", "--json")
    result = oktopk(site, tmp_path, *words)
    assert (result["dnn"], result["algorithm"], result["world"]) == ("wave", "randomk", 2)
    assert {phase: row["steps"] for phase, row in result["phases"].items()} == {"dense": 4, "sparse": 8}
    run = tmp_path / "run"
    reductions = rows(run / "metrics.jsonl", "reduction")
    assert {row["algorithm"] for row in reductions if row["phase"] == "sparse"} == {"randomk"}
    sparse = [row for row in rows(run / "metrics.jsonl", "step") if row["phase"] == "sparse"]
    # 437 entries of a byte and an index; with fp32 values alone they would be 1748 bytes
    assert all(437 < row["sent_bytes"] - row["control_bytes"] < 1600 for row in sparse)
    losses = [row["loss"] for row in rows(run / "metrics.jsonl", "train")]
    assert losses[-1] < losses[0]
    lines = (run / "lines.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in range(12)]
    assert "sparse" in lines[-1]
    assert len((run / "metrics.csv").read_text().splitlines()) == 13


def test_a_sweep(site: Path, tmp_path: Path) -> None:
    passed_on = ("--", "--dnn", "wave", *TINY, "--warmup-steps", "4", "--sinks", "lines")
    words = ("--algorithms", "randomk", "--density", "0.1", "--seeds", "3", "--ranks", "2", "--out", "sweep")
    table = oktopk(site, tmp_path, "sweep", *words, "--json", *passed_on)
    assert [(row["algorithm"], row["status"]) for row in table["runs"]] == [("randomk", "finished")]
    assert table["over_seeds"][0]["phase"] == "sparse"
    assert (tmp_path / "sweep" / "randomk-0.1-seed3" / "lines.txt").exists()


def test_the_benchmark(site: Path, tmp_path: Path) -> None:
    words = ("--ranks", "2", "--model", "mlp", "--params", "20k", "--steps", "2")
    contenders = ("--contenders", "ddp,randomk,randomk:int8,oktopk:int8")
    found = {row["name"]: row for row in oktopk(site, tmp_path, "bench", *words, *contenders, "--json")["records"]}
    assert found.keys() == {"ddp", "randomk", "randomk:int8", "oktopk:int8"}
    assert found["randomk:int8"]["values"] == "int8"
    assert 0 < found["randomk:int8"]["sent_bytes"] < found["randomk"]["sent_bytes"]


def test_hosts_of_a_lab_have_it_too(tmp_path: Path) -> None:
    """They inherit --import with the environment."""
    if problem := lab_problem():
        pytest.skip(problem)
    shutil.copy(ROOT / "examples" / "plugin" / "oktopk_example.py", tmp_path)
    (tmp_path / "mine.py").write_text(
        "import oktopk, oktopk_example as e\noktopk.ALGORITHMS['randomk'] = e.RandomK\n"
    )
    words = ("--link", "none", "--ranks", "2", "--model", "mlp", "--params", "20k", "--steps", "2")
    contenders = ("--import", "mine", "--contenders", "ddp,randomk")
    done = call([sys.executable, "-m", "oktopk", "bench", *words, *contenders, "--json"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ddp, ours = json.loads(done.stdout)["records"]
    assert (ours["name"], ours["link"]) == ("randomk", "none")
    assert 0 < ours["interface_bytes"] < ddp["interface_bytes"]


def test_the_simulator(site: Path, tmp_path: Path) -> None:
    words = ("--ranks", "2,3", "--params", "20k", "--density", "0.05", "--net", "1gbit:50us:4us")
    found = oktopk(site, tmp_path, "simulate", *words, "--algorithms", "topka,randomk", "--json")["answers"]
    sent = {(one["ranks"], one["algorithm"]): one["sent_bytes"] for one in found}
    assert sent[3, "randomk"] == pytest.approx(2 * sent[2, "randomk"], rel=0.2)
    assert sent.keys() == {(ranks, name) for ranks in (2, 3) for name in ("topka", "randomk")}


def test_a_race(site: Path, tmp_path: Path) -> None:
    ours = "randomk:density=0.1:values=int8:warmup_steps=2:auto=False:seed=3"
    words = ("--link", "none", "--contenders", f"ddp,{ours}", "--steps", "6", "--val-every-steps", "3")
    found = oktopk(
        site, tmp_path, "race", *words, "--target", "val loss<=0", "--out", "race", "--json", "--", "--dnn", "wave"
    )
    trials = {trial["contender"]: trial for trial in found["trials"]}
    assert trials.keys() == {"ddp", ours}
    assert list(trials[ours]["phases"]) == ["dense", "sparse"]
    start = {trial["curve"][0]["metrics"]["val loss"] for trial in trials.values()}
    assert len(start) == 1


def test_its_author_runs_the_laws(site: Path, tmp_path: Path) -> None:
    tests = shutil.copy(ROOT / "examples" / "plugin" / "test_laws.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tests)]
    done = call(command, tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_module_that_is_not_installed(tmp_path: Path) -> None:
    """--import finds it in the current folder, in the ranks too; an entry point is not needed."""
    shutil.copy(ROOT / "examples" / "plugin" / "oktopk_example.py", tmp_path)
    (tmp_path / "mine.py").write_text(
        "import oktopk, oktopk_example\nfrom oktopk.train.tasks import WORKLOADS\n"
        "oktopk.ALGORITHMS['randomk'] = oktopk_example.RandomK\nWORKLOADS['wave'] = oktopk_example.WAVE\n"
    )
    names = ("--import", "mine", "--dnn", "wave", "--compressor", "randomk")
    program = str(Path(sys.executable).with_name("oktopk"))
    words = [program, "train", *names, *TINY, *SPARSE, "--ranks", "2", "--out", "run", "--json"]
    done = call(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["algorithm"], result["dnn"], result["phases"]["sparse"]["steps"]) == ("randomk", "wave", 8)
