"""The examples do what they say: they learn, mostly by sparse steps, and resume.

They run on several ranks; two of them also alone, which they all do by the same function. One is started as its
user starts it, alone and by torchrun; processes of the others are forked. Those with frameworks are tested in
integrations_tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from oktopk.tools.report import build_report, read_run
from tests.support.examples import EXAMPLES, SECONDS, check, parse, run, run_forked, states

pytestmark = pytest.mark.timeout(3 * SECONDS)


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


def test_optimizer() -> None:
    out = run_forked("optimizer", ranks=2)
    check(parse(out), 2, (20, 180), accuracy=80)
    assert int(re.findall(r"^clipped +(\d+)", out, re.MULTILINE)[0]) > 0


@pytest.mark.parametrize(("ranks", "every"), [(None, 1), (2, 3)])
def test_local_optimizer(ranks: int | None, every: int) -> None:
    """Warm-up steps are exchanges; the last of 67 rounds has two steps."""
    out = run_forked("local_optimizer", "--sync-every", every, ranks=ranks)
    check(parse(out), ranks or 1, (20, 180) if every == 1 else (20, 47), accuracy=80)


def test_hsdp_resumes_on_another_mesh(tmp_path: Path) -> None:
    out = run_forked("hsdp", "--shards", 2, "--steps", 30, "--out", tmp_path / "checkpoint", ranks=4)
    assert "2 replicas x 2 shards" in out
    assert "0 to 30: 20 dense, 10 sparse" in out
    sent = {phase: float(size) for size, phase in re.findall(r"([\d.]+) kB in a (dense|sparse) step", out)}
    assert 0 < sent["sparse"] < 0.2 * sent["dense"]
    again = run_forked("hsdp", "--steps", 5, "--out", tmp_path / "checkpoint", "--resume")
    assert "1 replicas x 1 shards" in again
    assert "30 to 35: 5 sparse" in again
    losses = [float(re.findall(r"^val loss +([\d.]+)", text, re.MULTILINE)[0]) for text in (out, again)]
    assert losses[1] < losses[0] + 0.3 < 3.5


def test_manual_loop(tmp_path: Path) -> None:
    world = 2
    out = run_forked("manual_loop", "--out", tmp_path, ranks=world)
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
    out = run_forked("own_loop", "--out", tmp_path, ranks=2)
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
    out = run_forked("resume", *options, "--verify", ranks=2)
    check(parse(out), 2, (20, 40), accuracy=50)
    for rank in range(2):
        assert f"rank {rank}: 60 steps later, parameters and residuals are the same bits" in out
    out = run_forked("resume", *options, "--resume", ranks=3)
    assert "goes on from step 60, saved by 2 ranks, with 3" in out
    check(parse(out), 3, (0, 60), accuracy=60)
    saved = [checkpoint["oktopk"] for checkpoint in states(tmp_path / "step000120", "rank*.pt")]
    assert [(state["rank"], state["world"], state["step"]) for state in saved] == [(r, 3, 120) for r in range(3)]


def test_elastic_goes_on_by_itself_with_another_number_of_ranks(tmp_path: Path) -> None:
    options = ["--out", tmp_path, "--save-every", 25]
    first = run_forked("elastic", *options, "--steps", 60, ranks=2)
    assert "begins at step 0 with 2 ranks" in first
    check(parse(first), 2, (20, 40), accuracy=50)
    second = run_forked("elastic", *options, "--steps", 120)
    assert "begins at step 60 with 1 ranks" in second
    check(parse(second), 1, (0, 60), accuracy=60)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-00000075", "step-00000100", "step-00000120"]
