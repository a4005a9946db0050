"""The DDP tests in torch's wheel, with the hook on every model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("expecttest", reason="torch.testing needs expecttest")


def test_torchs_own_tests_of_ddp_pass(tmp_path: Path) -> None:
    settings = {"BACKEND": "gloo", "WORLD_SIZE": "2", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    environment = os.environ | settings | {"TEMP_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    job = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.torch_ddp"], env=environment, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    assert "Ran 5 tests" in job.stdout
