"""The comparison over MPI: its figures by records that were made up, and once on three ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from oktopk import ALGORITHMS
from tests.support.scripts import BENCHMARKS, load
from tests.support.worlds import need_mpi

PATIENCE = 500
"""Seconds; a busy machine is not a bug."""


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("mpi", monkeypatch)


@pytest.mark.parametrize("faster", ["mpi-allreduce", "dense"])
def test_all_are_compared_with_backward_and_with_the_faster_dense_way(mpi: ModuleType, faster: str) -> None:
    seconds = {"backward": 0.1, "mpi-allreduce": 0.9, "dense": 0.9, "oktopk": 0.2} | {faster: 0.6}
    records = [{"name": name, "median_step_seconds": taken} for name, taken in seconds.items()]
    found = {record["name"]: record for record in mpi.compare(records)}
    assert {name: record["dense_over_it"] for name, record in found.items()} == pytest.approx(
        {name: 0.6 / taken for name, taken in seconds.items()}
    )
    assert {name: record["above_backward_seconds"] for name, record in found.items()} == pytest.approx(
        {name: taken - 0.1 for name, taken in seconds.items()}
    )


def test_a_row_has_a_cell_for_each_header_and_none_for_what_nobody_knows(mpi: ModuleType) -> None:
    unknown = dict.fromkeys(("sent_bytes", "exposed_seconds", "hidden_share"))
    record = {"name": "x", "median_step_seconds": 0.2, "best_step_seconds": 0.1, "dense_over_it": 3.0}
    record |= {"above_backward_seconds": 0.15, "cpu_seconds": 0.05}
    assert mpi.row(record | unknown) == pytest.approx(["x", 200, 100, 3, 150, 50, None, None, None])
    known = {"sent_bytes": 2_500_000, "exposed_seconds": 0.03, "hidden_share": 0.4}
    assert mpi.row(record | known) == pytest.approx(["x", 200, 100, 3, 150, 50, 2.5, 30, "40 %"])
    assert len(mpi.row(record | known)) == len(mpi.HEADERS)


@pytest.mark.timeout(600)
def test_on_three_ranks(mpi: ModuleType, tmp_path: Path) -> None:
    need_mpi()
    params, steps, file = 100_003, 3, tmp_path / "mpi.json"
    words = ["--ranks", "3", "--params", str(params), "--steps", str(steps), "--timeout", str(PATIENCE)]
    command = [sys.executable, str(BENCHMARKS / "mpi.py"), *words, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE + 30, check=False)
    assert done.returncode == 0, done.stderr
    found = {record["name"]: record for record in json.loads(file.read_text())["records"]}
    assert tuple(found) == mpi.NAMES
    assert {"backward", "mpi-allreduce", *ALGORITHMS} <= set(found)
    lines = done.stdout.splitlines()
    assert lines[0].split("  ")[-1] == mpi.HEADERS[-1]
    assert [line.split()[0] for line in lines[1 : 1 + len(found)]] == list(found)
    dense = min(found[name]["median_step_seconds"] for name in ("mpi-allreduce", "dense"))
    for name, record in found.items():
        assert (record["ranks"], record["steps"], len(record["step_seconds"])) == (3, steps, steps)
        assert 0 < record["best_step_seconds"] == min(record["step_seconds"]) <= record["median_step_seconds"]
        assert record["dense_over_it"] * record["median_step_seconds"] == pytest.approx(dense)
        above = record["median_step_seconds"] - found["backward"]["median_step_seconds"]
        assert record["above_backward_seconds"] == pytest.approx(above)
        assert (record["sent_bytes"] is None) == (name in ("backward", "mpi-allreduce"))
    size = found["dense"]["params"]
    assert found["dense"]["modelled_bytes"] == pytest.approx(4 * size * 2 * 2 / 3, rel=1e-3)
    assert found["oktopk"]["sent_bytes"] < 0.1 * found["dense"]["sent_bytes"]
    sent = [found[f"oktopk{values}"]["sent_bytes"] for values in ("", ":fp16", ":e4m3")]
    assert sent == sorted(sent, reverse=True)
