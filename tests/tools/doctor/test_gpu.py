"""oktopk doctor --gpu: what it finds where there is no GPU, and how it words what it measures where there are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from oktopk.tools.doctor.findings import OK, PROBLEM, WARNING, Unknown
from oktopk.tools.doctor.gpu import compare_speed, run_jobs


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_runs_what_it_can() -> None:
    command = [sys.executable, "-m", "oktopk", "doctor", "--gpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    levels = {name: finding["level"] for name, finding in found.items()}
    assert levels == {"gpu": PROBLEM, "kernels": OK, "streams": WARNING, "host waits": OK, "ranks": OK}
    assert "finds no GPU" in found["gpu"]["found"]
    assert "2 ranks, gloo: oktopk-static keeps laws 1 and 2" in found["ranks"]["found"]


@pytest.mark.processes
def test_a_job_that_fails_is_a_finding_with_its_last_line() -> None:
    with pytest.raises(Unknown, match="KeyError: 'nothing'"):
        run_jobs("nothing")


@pytest.mark.parametrize(("static", "verdict"), [(0.002, "pays"), (0.0095, "does not pay")])
def test_the_verdict_compares_the_best_with_the_best(static: float, verdict: str) -> None:
    shown = compare_speed({"dense": 0.02, "bf16": 0.01, "oktopk": 0.03, "oktopk-static": static})
    assert shown.endswith(f"oktopk-static is {0.01 / static:.3g} times as fast as dense: {verdict}")
    assert "bf16          10 ms" in shown
