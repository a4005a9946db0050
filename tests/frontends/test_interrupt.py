"""Ctrl-C during training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import worlds
from tests.support.jobs import interrupt as interrupt_job

RANKS = 2


def test_all_ranks_end_in_order(tmp_path: Path) -> None:
    """Each says that it was interrupted; none ends by an abort, and no process stays behind."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with subprocess.Popen(
        [*launcher, "--redirects=3", f"--log-dir={tmp_path / 'logs'}", interrupt_job.__file__, tmp_path],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as job:  # fmt: skip
        try:
            under_way = [tmp_path / f"under way {rank}" for rank in range(RANKS)]
            worlds.wait_until(lambda: all(map(Path.exists, under_way)) or job.poll() is not None, 120)
            os.killpg(job.pid, signal.SIGINT)
            launcher_said, _ = job.communicate(timeout=40)
            left = not worlds.wait_until(lambda: not _alive(job.pid), 10)
        finally:
            if _alive(job.pid):
                os.killpg(job.pid, signal.SIGKILL)
    for rank in range(RANKS):
        said = "".join(log.read_text() for log in sorted(tmp_path.glob(f"logs/*/attempt_0/{rank}/*.log")))
        assert under_way[rank].exists(), said + launcher_said
        assert (said.splitlines() or [""])[-1].removeprefix(f"[rank{rank}]: ") == "KeyboardInterrupt", (
            said + launcher_said
        )
        assert "terminate called" not in said
    assert not left


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
