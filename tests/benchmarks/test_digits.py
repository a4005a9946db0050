"""It converges like dense: the digits benchmark, with the two contenders that matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BENCHMARK = ROOT / "benchmarks" / "digits.py"


@pytest.mark.timeout(540)
def test_one_percent_is_within_a_point_of_dense(tmp_path: Path) -> None:
    """Test accuracy at P = 4; nearly all steps are sparse. The benchmark itself takes the mean of three seeds."""
    figures = tmp_path / "digits.json"
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "--only", "oktopk 1 %", "--seeds", "1", "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    records = json.loads(figures.read_text())["records"]
    accuracy = {record["name"]: 100 * record["accuracy"] for record in records}
    assert len(records) == len(accuracy) == 2
    assert accuracy["dense"] > 90, accuracy  # it did learn
    assert accuracy["oktopk 1 %"] > accuracy["dense"] - 1, accuracy
    assert all(record["sparse_share"] > 0.9 for record in records if record["name"] != "dense")
