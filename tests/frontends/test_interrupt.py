"""Ctrl-C during training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support import worlds
from tests.support.jobs import interrupt as interrupt_job


def test_all_ranks_end_in_order() -> None:
    """Each says that it was interrupted; none ends by an abort, and no process stays behind."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*launcher, interrupt_job.__file__], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as job:  # fmt: skip
        try:
            assert job.stdout is not None
            lines = iter(job.stdout.readline, "")
            assert any("under way" in line for line in lines)
            os.killpg(job.pid, signal.SIGINT)
            said, _ = job.communicate(timeout=40)
            left = not worlds.wait_until(lambda: not _alive(job.pid), 10)
        finally:
            if _alive(job.pid):
                os.killpg(job.pid, signal.SIGKILL)
    assert said.count("KeyboardInterrupt") >= 2, said
    assert "terminate called" not in said
    assert not left


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
