"""It converges like dense: the digits benchmark, with the two contenders that matter."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "digits.py"


@pytest.mark.timeout(540)
def test_one_percent_is_within_a_point_of_dense(tmp_path: Path) -> None:
    """Mean test accuracy of three seeds at P = 4; nearly all steps are sparse."""
    figures = tmp_path / "digits.json"
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--only", "oktopk 1 %", "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    records = json.loads(figures.read_text())["records"]
    accuracy = {
        name: [100 * record["accuracy"] for record in records if record["name"] == name]
        for name in ("dense", "oktopk 1 %")
    }
    assert all(len(of_seeds) == 3 for of_seeds in accuracy.values())
    assert min(accuracy["dense"]) > 90, accuracy  # it did learn
    assert statistics.mean(accuracy["oktopk 1 %"]) > statistics.mean(accuracy["dense"]) - 1, accuracy
    assert all(record["sparse_share"] > 0.9 for record in records if record["name"] != "dense")
