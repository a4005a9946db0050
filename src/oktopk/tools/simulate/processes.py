"""Processes that measure something at the same time, and say what they found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from oktopk.signals import passing_on

from .network import SimulationError


def run_all(
    module: str, words: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[str]:
    """What `python -m module words` prints in each of these environments. No process is left, whatever happens."""
    command = [sys.executable, "-m", module, *words]
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout
    try:
        with passing_on(processes) as came:
            for own in environments:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
                processes.append(
                    subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
                )
            said = [] if came else [_answer(process, deadline) for process in processes]
        if came:
            raise KeyboardInterrupt
        failed = [process.returncode for process in processes if process.returncode]
        if failed:
            raise SimulationError(f"{module} has failed with exit code {failed[0]}: what it said is above")
        return said
    except subprocess.TimeoutExpired as error:
        raise SimulationError(f"{module} was not done in {timeout:g} s: the machine may be too busy") from error
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[bytes], deadline: float) -> str:
    return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].decode()
