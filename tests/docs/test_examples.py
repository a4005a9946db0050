"""The examples do what they say, alone and on several ranks: they learn, mostly by sparse steps, and resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from oktopk.tools.report import build_report, read_run
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
SECONDS = 200
"""For one run: most take about six, half of it imports; but a busy machine is not a bug."""
pytestmark = pytest.mark.timeout(3 * SECONDS)
FRAMEWORKS = {"accelerate": 60.0, "huggingface_trainer": 40.0, "lightning": 60.0}
"""The least accuracy, in percent, after the first of two runs; guessing gives 10."""


class Summary(NamedTuple):
    """What an example prints at its end."""

    ranks: int
    accuracy: float
    dense: int
    sparse: int
    skipped: int
    sent: dict[str, float]
    """Kilobytes per step, by phase."""
    ratio: float


def run(name: str, *options: object, ranks: int | None = None) -> str:
    """The output of an example: alone, or started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    # A session of its own: with the launcher, its ranks end too.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def parse(text: str) -> Summary:
    def find(pattern: str) -> list[str]:
        match = re.search(pattern, text, re.MULTILINE)
        assert match, text
        return list(match.groups())

    dense, sparse, skipped = map(int, find(r"^steps +(\d+) dense, (\d+) sparse, (\d+) of them skipped$"))
    sent = {phase: float(size) for size, phase in re.findall(r"([\d.]+) kB in a (dense|sparse) step", text)}
    (ranks,), (accuracy,) = find(r"^ranks +(\d+)$"), find(r"^accuracy +([\d.]+) %")
    return Summary(
        int(ranks), float(accuracy), dense, sparse, skipped, sent, float(find(r"^compression +(\d+)")[0])
    )


def check(summary: Summary, ranks: int, steps: tuple[int, int], accuracy: float, ratio: int = 100) -> None:
    """`ratio` is 1 / density."""
    assert (summary.ranks, summary.dense, summary.sparse) == (ranks, *steps)
    assert summary.accuracy >= accuracy
    assert 0.6 * ratio < summary.ratio < 1.5 * ratio
    if ranks == 1:
        assert not summary.sent
    elif summary.dense:
        assert 0 < summary.sent["sparse"] < 0.1 * summary.sent["dense"]


def states(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """What oktopk keeps, of all ranks."""
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob(pattern))]


def test_the_table_names_every_example() -> None:
    named = re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text())
    packages = (file.parent for file in EXAMPLES.glob("*/pyproject.toml"))
    assert sorted(named) == sorted(path.name for path in (*EXAMPLES.glob("*.py"), *packages))


def test_collective() -> None:
    out = run("collective", "--ranks", 3, "--size", 20_000, "--steps", 3)
    assert re.search(r"^oktopk +[\d.]+", out, re.MULTILINE)


@pytest.mark.parametrize("ranks", [None, 3])
def test_ddp(ranks: int | None) -> None:
    check(parse(run("ddp", ranks=ranks)), ranks or 1, (20, 180), accuracy=80)


@pytest.mark.parametrize("ranks", [None, 2])
def test_optimizer(ranks: int | None) -> None:
    out = run("optimizer", ranks=ranks)
    check(parse(out), ranks or 1, (20, 180), accuracy=80)
    assert int(re.findall(r"^clipped +(\d+)", out, re.MULTILINE)[0]) > 0


@pytest.mark.parametrize(("ranks", "every"), [(None, 1), (2, 1), (2, 3)])
def test_local_optimizer(ranks: int | None, every: int) -> None:
    """Warm-up steps are exchanges; the last of 67 rounds has two steps."""
    out = run("local_optimizer", "--sync-every", every, ranks=ranks)
    check(parse(out), ranks or 1, (20, 180) if every == 1 else (20, 47), accuracy=80)


@pytest.mark.parametrize("ranks", [None, 2])
def test_manual_loop(ranks: int | None, tmp_path: Path) -> None:
    world = ranks or 1
    out = run("manual_loop", "--out", tmp_path, ranks=ranks)
    summary = parse(out)
    check(summary, world, (20, 180), accuracy=80)
    assert summary.skipped == 1
    assert f"step 60 left out: rank {world - 1}: 0.weight" in out
    for rank in range(world):
        rows = [json.loads(line) for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["event"] == "step" and row["skipped"]] == [60]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace} == set(range(world))


def test_own_loop_gives_a_whole_report(tmp_path: Path) -> None:
    """Every question is answered from what the loop recorded and what it did; some answers are compared here."""
    out = run("own_loop", "--out", tmp_path, ranks=2)
    summary = parse(out)
    check(summary, 2, (20, 180), accuracy=80)
    assert "200 steps; the last one was sparse at 1 %: as asked for (auto=False)." in out
    ours = build_report([read_run(tmp_path, "own")])["runs"][0]
    answers = {one["question"]: one["answer"] for one in ours["answers"]}
    assert ours["notes"] == []
    assert (
        ours["about"] | {"algorithm": "oktopk", "world": 2, "density": 0.01, "parameters": 167178} == ours["about"]
    )
    assert answers["When did the sparse phase start?"].startswith("At step 20 (the first is 0). Of 200 steps")
    assert "What did auto decide?" not in answers  # it is off
    for question, answer in answers.items():
        assert not re.search("not recorded|not known|no validation|No loss|No times|No messages", answer), question
    assert f"accuracy {summary.accuracy / 100:.3g}" in answers["Does it learn?"]
    assert len(ours["validations"]) == 4


def test_resume_gives_the_same_bits_and_changes_its_number_of_ranks(tmp_path: Path) -> None:
    options = ["--out", tmp_path, "--steps", 60]
    out = run("resume", *options, "--verify", ranks=2)
    check(parse(out), 2, (20, 40), accuracy=50)
    for rank in range(2):
        assert f"rank {rank}: 60 steps later, parameters and residuals are the same bits" in out
    out = run("resume", *options, "--resume", ranks=3)
    assert "goes on from step 60, saved by 2 ranks, with 3" in out
    check(parse(out), 3, (0, 60), accuracy=60)
    saved = [checkpoint["oktopk"] for checkpoint in states(tmp_path / "step000120", "rank*.pt")]
    assert [(state["rank"], state["world"], state["step"]) for state in saved] == [(r, 3, 120) for r in range(3)]


def test_elastic_goes_on_by_itself_with_another_number_of_ranks(tmp_path: Path) -> None:
    options = ["--out", tmp_path, "--save-every", 25]
    first = run("elastic", *options, "--steps", 60, ranks=2)
    assert "begins at step 0 with 2 ranks" in first
    check(parse(first), 2, (20, 40), accuracy=50)
    second = run("elastic", *options, "--steps", 120)
    assert "begins at step 60 with 1 ranks" in second
    check(parse(second), 1, (0, 60), accuracy=60)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-00000075", "step-00000100", "step-00000120"]


def test_resume_alone(tmp_path: Path) -> None:
    out = run("resume", "--out", tmp_path, "--verify", "--steps", 30, "--warmup-steps", 5)
    check(parse(out), 1, (5, 25), accuracy=15)
    assert "rank 0: 30 steps later, parameters and residuals are the same bits" in out


def test_a_framework_alone() -> None:
    """One stands for all, because they start slowly."""
    out = run("accelerate", "--steps", 20, "--warmup-steps", 5, "--density", 0.05)
    check(parse(out), 1, (5, 15), accuracy=10, ratio=20)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_save_and_resume_every_rank(name: str, tmp_path: Path) -> None:
    """A second run needs no warm-up, and goes on counting: it has loaded what each rank had saved."""
    options = ["--out", tmp_path, "--density", 0.05]
    check(parse(run(name, *options, "--steps", 100, ranks=2)), 2, (20, 80), FRAMEWORKS[name], ratio=20)
    check(parse(run(name, *options, "--steps", 20, "--resume", ranks=2)), 2, (0, 20), FRAMEWORKS[name], ratio=20)
    folder = tmp_path / "checkpoint-120" if name == "huggingface_trainer" else tmp_path
    first, second = states(folder, "*oktopk-rank*")
    assert [(state["rank"], state["world"], state["step"]) for state in (first, second)] == [
        (0, 2, 120),
        (1, 2, 120),
    ]
    different = [not torch.equal(kept, second["residuals"][key]) for key, kept in first["residuals"].items()]
    assert any(different)
