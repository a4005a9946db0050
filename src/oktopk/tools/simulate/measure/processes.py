"""Run measurement processes at the same time and collect their output."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from oktopk.utils.processes import Process, start_processes
from oktopk.utils.signals import Interrupted

from ..network import SimulationError


def run_all(
    module: str, words: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[str]:
    """Run `python -m module words` once per environment, all at the same time; returns their output."""
    command = [sys.executable, "-m", module, *words]
    wanted = [Process({"OMP_NUM_THREADS": "1", **own}, subprocess.PIPE) for own in environments]
    deadline = time.monotonic() + timeout
    with start_processes(command, wanted) as (processes, came):
        try:
            outputs = [_read_output(process, deadline) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise SimulationError(
                f"{module} did not finish in {timeout:g} s: the machine may be too busy"
            ) from error
    if came:
        raise Interrupted(came[-1])
    failed = [process.returncode for process in processes if process.returncode]
    if failed:
        raise SimulationError(f"{module} failed with exit code {failed[0]}: see its output above")
    return outputs


def _read_output(process: subprocess.Popen[bytes], deadline: float) -> str:
    return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].decode()
