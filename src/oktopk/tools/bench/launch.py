"""Start the ranks of a measurement: on hosts of a lab, or on loopback; and leave none behind."""

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
from oktopk.utils.processes import Process, local_world, started
from oktopk.utils.signals import Interrupted

from .figures import Record
from .plan import Plan

NO_LIMIT = "none"
_POLL, _GRACE = 0.05, 5.0


def measure(plan: Plan, links: Sequence[str]) -> Iterator[list[Record]]:
    """The records of each link, as they come; without links, those of processes on loopback."""
    if not links:
        yield json.loads(on_loopback(_command(plan), plan.ranks, plan.timeout, plan.progress))
        return
    with Lab(plan.ranks // plan.ranks_per_host, ranks_per_host=plan.ranks_per_host) as lab:
        for link in links:
            lab.set_rate(None if link == NO_LIMIT else link)
            # Rank 0 shows its bar by way of this process, but its records are not for the screen.
            with contextlib.redirect_stdout(io.StringIO()):
                command = _command(replace(plan, link=link))
                results = lab.run(command, timeout=plan.timeout, stream=plan.progress)
            yield json.loads(results[0].stdout)


def _command(plan: Plan) -> list[str]:
    return [sys.executable, "-m", "oktopk.tools.bench.job", plan.to_json()]


def on_loopback(command: Sequence[str], ranks: int, timeout: float, show: bool = False) -> str:
    """What rank 0 has printed. `show` lets its stderr through."""
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as stack:
        outputs = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in range(ranks)]
        world = stack.enter_context(local_world(ranks))
        wanted = [
            Process({**environment, **own}, out, None if show and rank == 0 else err)
            for rank, (environment, (out, err)) in enumerate(zip(world, outputs, strict=True))
        ]
        with started(command, wanted) as (processes, came):
            failed, late = _watch(processes, timeout, came)
        results = [
            RankResult(rank, process.returncode, _text(out), _text(err))
            for rank, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True))
        ]
    if came:
        raise Interrupted(came[-1])
    said = "\n".join(results[rank].describe() for rank in failed or late)
    if failed:
        raise JobFailed(said, results)
    if late:
        raise JobTimeout(f"not done within {timeout:g} s: give more --timeout, or fewer --steps\n{said}", results)
    return results[0].stdout


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], timeout: float, came: Sequence[signal.Signals]
) -> tuple[list[int], list[int]]:
    """Wait for all, or for a signal: the ranks that failed first, after which the others have a moment to say
    what they saw, and those that are not done in time."""
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
