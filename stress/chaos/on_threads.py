"""Cases on ranks that are threads of this process: run without the fault and with it, and judged."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import oktopk
from oktopk.engine.hierarchy import shared_memory
from stress.chaos.cases import AUTO_DECIDES, FAULTS_PER_JOB, IMPATIENT, PATIENT, Job, fault_of, harmless, job_of
from stress.chaos.faults import Death, Fault, Faulty, Moment
from stress.chaos.jobs import Report, take_part
from stress.chaos.judging import HANG, LEAK, Verdict, judge, lateness

LIMIT = 30.0
"""Seconds beyond all timeouts after which a case hangs."""


def examine(number: int) -> Verdict:
    """Run a case, and judge it."""
    job, expected = job_of(number), undisturbed(number // FAULTS_PER_JOB)
    fault = fault_of(number, [foreseeable(job, report.moments) for report in expected])
    for timeout in (PATIENT,) if harmless(fault) else (IMPATIENT, PATIENT):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(shared_memory, "_FOLDER", Path(folder)):
            before = left_behind(folder)
            reports = run(job, fault, timeout)
            if reports is None:
                return Verdict(number, fault.kind, HANG, f"{job}, {fault}")
            left = leaked(before, folder)
        if left or reports[fault.rank].struck is not None:
            break  # else a busy machine may have ended the job before its fault: once more, with patience
    went, what = judge(job, fault, expected, reports, harmless(fault))
    if left:
        went, what = LEAK, f"still there: {left}"
    late = lateness(fault, reports, timeout)
    return Verdict(number, fault.kind, went, what and f"{what}\n{job}\n{fault}", late)


def foreseeable(job: Job, moments: Sequence[Moment]) -> list[Moment]:
    """Those that come in every run: what is done after `auto` has decided is the clock's choice."""
    return [moment for moment in moments if not job.auto or moment.step <= AUTO_DECIDES]


@functools.lru_cache(1)
def undisturbed(job_number: int) -> list[Report]:
    """What becomes of a job without a fault: for the judge, and for its moments."""
    job = job_of(job_number * FAULTS_PER_JOB)
    reports = run(job, None, PATIENT)
    assert reports is not None, f"{job} hangs without a fault"
    for rank, report in enumerate(reports):
        assert report.error is None, f"{job} fails on rank {rank} without a fault: {report.error!r}"
    return reports


def run(job: Job, fault: Fault | None, timeout: float) -> list[Report] | None:
    """What becomes of each rank; None if one of them hangs."""
    reports = [Report() for _ in range(job.world)]

    def rank(comm: oktopk.Communicator) -> None:
        with contextlib.suppress(Death):  # not a word to the others
            take_part(job, Faulty(comm, fault), reports[comm.rank])

    def world() -> None:
        with contextlib.suppress(Exception):  # it is in the report of its rank
            oktopk.run_threads(job.world, rank, timeout)

    thread = threading.Thread(target=world, name="chaos", daemon=True)
    thread.start()
    thread.join(job.steps * timeout + LIMIT)
    if thread.is_alive():
        return None
    for report in reports:
        forget_frames(report.error)
    return reports


def forget_frames(error: BaseException | None) -> None:
    """Keep what an error says, and not what the ranks had in hand when it was raised."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def left_behind(folder: str) -> dict[str, set[Any]]:
    """What a case may leave: threads, open files, and files that name shared memory."""
    return {
        "threads": set(threading.enumerate()),
        "open files": set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set(),
        "files": set(os.listdir(folder)),
    }


def leaked(before: dict[str, set[Any]], folder: str, patience: float = 5.0) -> dict[str, set[Any]]:
    """What was not there before, and does not go."""
    deadline = time.monotonic() + patience
    while True:
        now = left_behind(folder)
        left = {name: now[name] - was for name, was in before.items() if now[name] - was}
        if not left or time.monotonic() > deadline:
            return left
        if "threads" in left:
            time.sleep(0.001)
        else:
            gc.collect()  # ranks are in circles of references, and with them the memory of their host
