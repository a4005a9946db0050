"""Cases on real processes, over gloo, MPI, and gloo in network namespaces: run, struck, and judged."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import oktopk
from oktopk.tools.lab import Lab
from stress.chaos import on_threads
from stress.chaos.cases import Job
from stress.chaos.faults import Acts, Burned, Fault, Faulty, burn
from stress.chaos.jobs import Report, take_part
from stress.chaos.judging import HANG, LEAK, MISSED, WRONG, Verdict, judge, lateness
from stress.chaos.process_cases import IMPATIENT, LINKS, PATIENT, fault_of, harmless, job_of, transport_of
from stress.chaos.spaces import LabRanks
from tests.support import worlds
from tests.support.labs import machine_interfaces, spaces_of

START, LIMIT = 120.0, 30.0
"""Seconds for ranks to start, which a busy machine does slowly; and beyond the timeouts, after which a rank that
still runs hangs."""
_MARK = "OKTOPK_CHAOS"


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Whatever is started in this block can be told from what others start, and has its files in one place."""
    util.get_temp_dir()  # lasts as long as this process: it must be outside
    with tempfile.TemporaryDirectory(prefix="oktopk-chaos-") as directory:
        cache = Path(directory) / "cache"  # torch makes it whenever it likes
        cache.mkdir()
        environment = {
            _MARK: uuid.uuid4().hex,
            "TMPDIR": directory,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # a lost store is no news here
        }
        with mock.patch.dict(os.environ, environment), mock.patch.object(tempfile, "tempdir", directory):
            _stop_server()  # it has what another environment was
            forkserver.ensure_running()
            resource_tracker.ensure_running()
            try:
                yield
            finally:
                _stop_server()


def _stop_server() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def examine(number: int, transports: Sequence[str]) -> Verdict:
    """Run a case, and judge it."""
    transport, job = transport_of(number, transports), job_of(number)
    expected = on_threads.run(job, None, PATIENT)
    assert expected is not None, f"{job} hangs without a fault"
    fault = fault_of(number, transports, [report.moments for report in expected])
    kind, before = f"{transport}: {fault.kind}", _left_behind()
    told = f"\n{job}\n{fault}"
    try:
        reports = run(transport, job, fault)
    except Bad as bad:
        return Verdict(number, kind, bad.went, f"{bad}{told}")
    nameable = transport != "lab" or fault.rank != 0  # with host 0 goes the store that ranks leave notes in
    went, what = judge(job, fault, expected, reports, harmless(fault), nameable)
    worlds.wait_until(lambda: not _new_since(before), 10)
    if left := _new_since(before):
        went, what = LEAK, f"still there: {left}"
    late = lateness(fault, reports, PATIENT if harmless(fault) else IMPATIENT)
    return Verdict(number, kind, went, what and what + told, late)


class Bad(Exception):
    """A run that has no reports worth judging."""

    def __init__(self, went: str, what: str) -> None:
        super().__init__(what)
        self.went = went


def _left_behind() -> dict[str, set[Any]]:
    """What a run may leave: processes (and with them ports), files, namespaces, interfaces."""
    return {
        "processes": _processes(),
        "files": set(os.listdir(tempfile.gettempdir())),
        "namespaces": set(spaces_of(os.getpid())),
        "interfaces": set(machine_interfaces()),
    }


def _processes() -> set[int]:
    """All that run and were started from here, by whomever."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    processes = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                processes.add(int(pid))
    return processes


def _new_since(before: dict[str, set[Any]]) -> dict[str, set[Any]]:
    return {name: new for name, now in _left_behind().items() if (new := now - before[name])}


# Running.


def run(transport: str, job: Job, fault: Fault) -> list[Report]:
    """What becomes of each rank."""
    timeout = PATIENT if harmless(fault) else IMPATIENT
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        signs = Path(directory)
        lab = stack.enter_context(Lab(job.world)) if transport == "lab" else None
        ranks = stack.enter_context(_start(transport, lab, job, fault, timeout, signs))
        if not worlds.wait_until(
            lambda: all((signs / f"ready {rank}").exists() for rank in range(job.world)), START
        ):
            raise Bad(HANG, f"not all ranks are ready after {START:g} s\n{ranks.output()}")
        if fault.kind in FROM_OUTSIDE:
            if not worlds.wait_until((signs / "now").exists, LIMIT):
                raise Bad(MISSED, f"the moment of the fault has not come\n{ranks.output()}")
            FROM_OUTSIDE[fault.kind](ranks, lab, fault)
            (signs / "done").touch()
        survivors = [rank for rank in range(job.world) if rank != fault.rank or fault.kind != "stop"]
        if late := ranks.running(survivors, timeout + LIMIT):
            raise Bad(HANG, f"ranks {late} still run after {timeout + LIMIT:g} s\n{ranks.output()}")
        _check_ends(ranks, survivors, fault)
        return [_report(ranks, rank, fault, signs) for rank in range(job.world)]


def _check_ends(ranks: worlds.Ranks, survivors: Sequence[int], fault: Fault) -> None:
    """Ranks that were not struck down have ended in order, and have left no process: before all are reaped."""
    if not isinstance(ranks, worlds.GlooRanks):  # mpiexec ends with its last rank
        return
    gone = [rank for rank in survivors if rank != fault.rank or fault.kind != "die"]
    worlds.wait_until(lambda: all(ranks.gone(rank) for rank in gone), 10)
    codes = {rank: ranks.processes[rank].exitcode for rank in gone}
    if any(codes.values()):
        raise Bad(WRONG, f"exit codes are {codes}")
    stopped = {ranks.pid(fault.rank)} if fault.kind == "stop" else set()
    servers = {os.getpid(), *_servers()}
    worlds.wait_until(lambda: not _processes() - stopped - servers, 10)
    if left := _processes() - stopped - servers:
        raise Bad(LEAK, f"processes {left} are still there")


def _servers() -> set[int]:
    """What multiprocessing keeps for later ranks."""
    kept = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    return {pid for pid in kept if pid is not None}


def _start(transport: str, lab: Lab | None, job: Job, fault: Fault, timeout: float, signs: Path) -> worlds.Ranks:
    args = job, fault, timeout, signs
    if lab is not None:
        return LabRanks(lab, rank_of_case, args)
    return worlds.start(transport, job.world, rank_of_case, *args, transport == "gloo")


def _report(ranks: worlds.Ranks, rank: int, fault: Fault, signs: Path) -> Report:
    outcome = ranks.outcome(rank)
    if isinstance(outcome.value, Report):
        return outcome.value
    if rank == fault.rank and fault.kind in ("die", "stop"):
        return Report(error=Burned(fault.kind), struck=float((signs / "now").read_text()))
    return Report(error=outcome.error or RuntimeError(outcome.trace))


# From outside, when the moment has come.


def _wake_up(ranks: worlds.Ranks, lab: Lab | None, fault: Fault) -> None:
    pid = ranks.pid(fault.rank)
    worlds.wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", LIMIT)
    time.sleep(fault.seconds)
    os.kill(pid, signal.SIGCONT)


def _pull_cable(ranks: worlds.Ranks, lab: Lab | None, fault: Fault) -> None:
    assert lab is not None
    lab.set_link(fault.rank, up=False)
    if harmless(fault):
        time.sleep(fault.seconds)
        lab.set_link(fault.rank, up=True)


FROM_OUTSIDE: dict[str, Callable[[worlds.Ranks, Lab | None, Fault], None]] = {
    "stop a while": _wake_up,
    "link down": _pull_cable,
    "link down a while": _pull_cable,
}


# In the process of a rank.


def rank_of_case(
    connect: Callable[..., oktopk.Communicator], job: Job, fault: Fault, timeout: float, signs: Path,
    companion: bool = False,
) -> Report:  # fmt: skip
    """All steps, over a communicator that lets the fault happen; the error is in the report.

    A companion has connections of its own, as front ends have.
    """
    torch.set_num_threads(1)
    comm, report = connect(timeout=60.0, **({"companion": True} if companion else {})), Report()
    oktopk.sparse_allreduce(torch.ones(2000), 0.05, comm=comm)  # compiles the kernels
    comm.timeout = timeout
    (signs / f"ready {comm.rank}").touch()
    with contextlib.suppress(Exception):
        take_part(job, Faulty(comm, fault, _acts(signs)), report)
    return report


def _write_now(signs: Path) -> None:
    worlds._write(signs / "now", str(time.monotonic()).encode())


def _acts(signs: Path) -> Acts:
    def send_myself(number: signal.Signals) -> Callable[[Fault], None]:
        def act(fault: Fault) -> None:
            _write_now(signs)
            os.kill(os.getpid(), number)

        return act

    def wait_for_the_cable(fault: Fault) -> None:
        _write_now(signs)
        worlds.wait_until((signs / "done").exists, LIMIT)

    return {
        "raise": burn,
        "die": send_myself(signal.SIGKILL),
        "stop": send_myself(signal.SIGSTOP),
        "stop a while": send_myself(signal.SIGSTOP),
        **dict.fromkeys(LINKS, wait_for_the_cable),
    }
