"""Run measurement processes at the same time and collect their output."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO

from oktopk.utils.processes import Process, start_processes
from oktopk.utils.signals import Interrupted

from ..network import SimulationError


def run_all(
    module: str, words: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[str]:
    """Run `python -m module words` once per environment, all at the same time; returns their output."""
    command = [sys.executable, "-m", module, *words]
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in environments]
        wanted = [
            Process({"OMP_NUM_THREADS": "1", **own}, subprocess.PIPE, file)
            for own, file in zip(environments, errors, strict=True)
        ]
        with start_processes(command, wanted) as (processes, came):
            try:
                outputs = [_read_output(process, deadline) for process in processes]
            except subprocess.TimeoutExpired as error:
                raise SimulationError(
                    f"{module} did not finish in {timeout:g} s: the machine may be too busy"
                ) from error
        if came:  # their tracebacks are no news then
            raise Interrupted(came[-1])
        for process, file in zip(processes, errors, strict=True):
            if process.returncode:
                raise SimulationError(f"{module} failed with exit code {process.returncode}:\n{_text(file)}")
    return outputs


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _read_output(process: subprocess.Popen[bytes], deadline: float) -> str:
    return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0].decode()
