"""Processes that measure something at the same time, and say what they found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from oktopk.signals import passing_on

from .network import SimulationError


def run_all(
    module: str, words: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[str]:
    """What `python -m module words` prints in each of these environments. No process is left, whatever happens."""
    command = [sys.executable, "-m", module, *words]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for own in environments:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
            )
        with passing_on(processes) as came:
            said = [process.communicate(timeout=timeout)[0].decode() for process in processes]
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
