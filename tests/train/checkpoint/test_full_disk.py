"""A disk that is really full."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def can_mount(folder: Path) -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_all_ranks_say_that_the_disk_is_full_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("needs root, to mount a small disk")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-m", "tests.support.jobs.full_disk", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(set(found["said"])) == 1
    # rank 1 fills the disk, others may be the first to find it full
    full = r"step-00000020 could not be saved: rank [012]: \[Errno 28\] No space left on device"
    assert re.search(full, found["said"][0])
    assert found["left"] == ["step-00000010"]
    assert found["loaded"] == [10, 10, 10]
    assert found["then"] == ["step-00000030"]
    assert os.listdir(tmp_path) == []  # the disk is gone with the process
