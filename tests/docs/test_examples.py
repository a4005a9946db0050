"""The examples do what they say, alone and on several ranks: they learn, mostly by sparse steps, and resume.

Those with frameworks are tested in integrations_tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.examples import EXAMPLES, SECONDS, check, parse, run, states

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
