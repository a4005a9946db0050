"""A training between hosts: the report's bytes and messages are those of the meters, and of the kernel."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from oktopk.tools.lab import Lab, lab_problem
from oktopk.tools.report import build_report, read_run
from tests.support.jobs import report_lab as report_lab_job
from tests.support.jobs.report_lab import PATIENCE, PAUSES, STEPS, metered_file
from tests.support.paths import ROOT
from tests.support.worlds import wait_until

pytestmark = pytest.mark.timeout(600)
HOSTS = 3
OVERHEAD = 0.05
"""Of TCP/IP, with acknowledgements and the small sums of the losses."""
Kinds = dict[tuple[Any, ...], tuple[float, float, dict[int, float]]]
"""Bytes, messages and their sizes, by operation, stage and whether it is control."""


def watched(lab: Lab, folder: Path) -> tuple[list[list[int]], list[Kinds]]:
    """Train. At each pause: what every host has sent, and what the report, which is made then, says of rank 0."""
    sent, said = [], []
    job = lab.start([sys.executable, "-m", report_lab_job.__name__, str(folder)], env={"PYTHONPATH": str(ROOT)})
    for step in PAUSES:
        waiting = [metered_file(folder, rank, step) for rank in range(HOSTS)]
        there = wait_until(lambda files=waiting: all(file.exists() for file in files), PATIENCE)
        assert there, [result.describe() for result in job.end()]
        sent.append([host.sent_bytes for host in lab.counters()])
        said.append(reported(figures(folder)))
        (folder / f"go-{step}").touch()
    job.wait(PATIENCE)
    return sent, said


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(build_report([read_run(folder, "run")])))["runs"][0]
    return found


def by_kind(parts: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Kinds:
    """Without kinds that sent nothing."""
    found: Kinds = {}
    for kind, part in parts:
        bytes_, messages, sizes = found.get(kind, (0.0, 0.0, {}))
        total = Counter(sizes)
        total.update({int(power): count for power, count in part["sizes"].items()})
        found[kind] = (bytes_ + part["bytes"], messages + part["messages"], dict(total))
    return {kind: moved for kind, moved in found.items() if moved[1]}


def metered(folder: Path, rank: int, step: int = STEPS) -> Kinds:
    """Up to this step."""
    parts = json.loads(metered_file(folder, rank, step).read_text())
    return by_kind((tuple(part["kind"]), part) for part in parts)


def total(kinds: Kinds) -> float:
    return sum(bytes_ for bytes_, _, _ in kinds.values())


def reported(run: Mapping[str, Any]) -> Kinds:
    """Of rank 0."""
    return by_kind(((part["operation"], part["stage"], part["control"]), part) for part in run["messages"])


def sent_by(rank: int, run: Mapping[str, Any]) -> float:
    return sum(means["steps"] * means["sent_bytes_by_rank"][rank] for means in run["phases"].values())


def test_the_report_says_what_was_metered_and_what_the_kernel_has_counted(tmp_path: Path) -> None:
    """Between two pauses there are sparse steps alone, without the start and the end of the run."""
    if problem := lab_problem():
        pytest.skip(problem)
    with Lab(HOSTS) as lab:
        sent, said = watched(lab, tmp_path)
    assert said == [metered(tmp_path, 0, step) for step in PAUSES]
    for rank in range(HOSTS):
        before, after = (total(metered(tmp_path, rank, step)) for step in PAUSES)
        assert after - before > 1e6
        assert after - before < sent[1][rank] - sent[0][rank] < (1 + OVERHEAD) * (after - before)

    run = figures(tmp_path)
    assert {phase: means["steps"] for phase, means in run["phases"].items()} == {"dense": 1, "sparse": STEPS - 1}
    assert reported(run) == metered(tmp_path, 0)
    assert all(sum(sizes.values()) == messages for _, messages, sizes in reported(run).values())
    own = sum(means["steps"] * means["sent_bytes"] for means in run["phases"].values())
    assert own == pytest.approx(total(reported(run)))
    for rank in range(HOSTS):
        assert sent_by(rank, run) == pytest.approx(total(metered(tmp_path, rank)))
