"""Start the ranks of a measurement, in a lab or on loopback, and end all of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

from oktopk.tools.lab import JobFailed, JobTimeout, Lab, RankResult
from oktopk.utils.processes import Process, local_world, start_processes
from oktopk.utils.signals import Interrupted

from .plan import Plan
from .records import Record

NO_LIMIT = "none"
_POLL, _GRACE = 0.05, 5.0


def measure(plan: Plan, links: Sequence[str]) -> Iterator[list[Record]]:
    """Yield the records of each link; without links, those of processes on loopback."""
    if not links:
        yield json.loads(run_on_loopback(_command(plan), plan.ranks, plan.timeout, plan.progress))
        return
    with Lab(plan.ranks // plan.ranks_per_host, ranks_per_host=plan.ranks_per_host) as lab:
        for link in links:
            lab.set_rate(None if link == NO_LIMIT else link)
            # The lab forwards the progress bar of rank 0; its records must not be shown.
            with contextlib.redirect_stdout(io.StringIO()):
                command = _command(replace(plan, link=link))
                results = lab.run(command, timeout=plan.timeout, stream=plan.progress)
            yield json.loads(results[0].stdout)


def _command(plan: Plan) -> list[str]:
    return [sys.executable, "-m", "oktopk.tools.bench.job", plan.to_json()]


def run_on_loopback(command: Sequence[str], ranks: int, timeout: float, show: bool = False) -> str:
    """Run the command as `ranks` processes on loopback; returns the stdout of rank 0. `show` shows its stderr."""
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with contextlib.ExitStack() as stack:
        outputs = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in range(ranks)]
        world = stack.enter_context(local_world(ranks))
        wanted = [
            Process({**environment, **own}, out, None if show and rank == 0 else err)
            for rank, (environment, (out, err)) in enumerate(zip(world, outputs, strict=True))
        ]
        with start_processes(command, wanted) as (processes, came):
            failed, late = _watch(processes, timeout, came)
        results = [
            RankResult(rank, process.returncode, _text(out), _text(err))
            for rank, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True))
        ]
    if came:
        raise Interrupted(came[-1])
    described = "\n".join(results[rank].describe() for rank in failed or late)
    if failed:
        raise JobFailed(described, results)
    if late:
        raise JobTimeout(
            f"not finished within {timeout:g} s: raise --timeout, or use fewer --steps\n{described}", results
        )
    return results[0].stdout


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], timeout: float, came: Sequence[signal.Signals]
) -> tuple[list[int], list[int]]:
    """Wait for all processes, or for a signal; returns the ranks that failed first, and those that did not finish.

    After a failure the others get a moment to report their own errors.
    """
    deadline = time.monotonic() + timeout
    failed: list[int] = []
    while (running := _running(processes)) and not came and time.monotonic() < deadline:
        if not failed and (failed := _failed(processes)):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(_POLL)
    return failed or _failed(processes), running


def _running(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.poll()]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
