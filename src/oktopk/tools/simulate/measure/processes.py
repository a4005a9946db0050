"""Processes that measure something at the same time, and say what they found."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from oktopk.utils.processes import Process, started
from oktopk.utils.signals import Interrupted

from ..network import SimulationError


def run_all(
    module: str, words: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[str]:
    """What `python -m module words` prints in each of these environments. No process is left, whatever happens."""
    command = [sys.executable, "-m", module, *words]
    wanted = [Process({"OMP_NUM_THREADS": "1", **own}, subprocess.PIPE) for own in environments]
    deadline = time.monotonic() + timeout
    with started(command, wanted) as (processes, came):
        try:
            said = [_answer(process, deadline) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise SimulationError(
                f"{module} was not done in {timeout:g} s: the machine may be too busy"
            ) from error
    if came:
        raise Interrupted(came[-1])
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise SimulationError(f"{module} has failed with exit code {failed[0]}: what it said is above")
    return said


def _answer(process: subprocess.Popen[bytes], deadline: float) -> str:
    return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].decode()
