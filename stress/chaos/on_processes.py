"""Cases on real processes, in every setting of `process_cases`: run, struck, and judged."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest import mock

from oktopk.tools.lab import Lab
from stress.chaos import on_threads
from stress.chaos.cases import Job
from stress.chaos.children import end_orphans
from stress.chaos.faults import EVERYBODY, Burned, Fault
from stress.chaos.jobs import Report
from stress.chaos.judging import ENDED, HANG, LEAK, MISSED, WRONG, GlooAbort, Verdict, judge, judge_sums, lateness
from stress.chaos.process_cases import (
    DEATHS,
    FORKS,
    GLOO,
    LINKS,
    NOTICED,
    PATIENT,
    SETTINGS,
    WITH_CHILDREN,
    Setting,
    fault_of,
    harmless,
    job_of,
    setting_of,
    timeout_of,
)  # fmt: skip
from stress.chaos.rank import Orders, gloo_stderr, rank_of_case
from stress.chaos.relay import ANY, BYTE_FAULTS, HARMLESS, Relay, Strike
from stress.chaos.spaces import LabRanks
from tests.support import worlds
from tests.support.labs import machine_interfaces, spaces_of

START, LIMIT = 120.0, 30.0
"""Seconds for ranks to start, which a busy machine does slowly; and beyond the timeouts, after which a rank that
still runs hangs."""
_MARK = "OKTOPK_CHAOS"
_ENFORCED = "[enforce fail at "
"""gloo's last words, from a thread of its own, where no error of it can be caught."""


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


def examine(number: int, settings: Sequence[str]) -> Verdict:
    """Run a case, and judge it."""
    name, job = setting_of(number, settings), job_of(number, settings)
    expected = undisturbed(name, job)
    fault = fault_of(number, settings, [report.moments for report in expected])
    kind, before = f"{name}: {fault.kind}", _left_behind()
    told = f"\n{job}\n{fault}"
    try:
        reports = run(SETTINGS[name], job, fault)
    except Bad as bad:
        return Verdict(number, kind, bad.went, f"{bad}{told}")
    late = lateness(fault, reports, timeout_of(fault))
    if SETTINGS[name].relay == GLOO:
        went, what = judge_sums(job, fault, expected, reports, harmless(fault))
    else:
        nameable = name != "lab" or fault.rank != 0  # with host 0 goes the store that ranks leave notes in
        went, what = judge(job, fault, expected, reports, harmless(fault), nameable)
    if fault.kind in FORKS and went == ENDED and late + WITH_CHILDREN > NOTICED:
        went, what = WRONG, f"noticed after {late + WITH_CHILDREN:.1f} s only"
    worlds.wait_until(lambda: not _new_since(before), 10)
    if left := _new_since(before):
        went, what = LEAK, f"still there: {left}"
    return Verdict(number, kind, went, what and what + told, late)


def undisturbed(name: str, job: Job) -> list[Report]:
    """What becomes of a job without a fault: on threads, if sparse steps have the same bits there."""
    if job.front_end != "ddp" and SETTINGS[name].relay != GLOO:
        reports = on_threads.run(job, None, PATIENT)
        assert reports is not None, f"{job} hangs without a fault"
        return reports
    if repr((name, job)) not in _undisturbed:
        _undisturbed[repr((name, job))] = run(SETTINGS[name], job, None)
    reports = _undisturbed[repr((name, job))]
    for rank, report in enumerate(reports):
        assert report.error is None, f"{job} fails on rank {rank} without a fault: {report.error!r}"
    return reports


_undisturbed: dict[str, list[Report]] = {}


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


def run(setting: Setting, job: Job, fault: Fault | None) -> list[Report]:
    """What becomes of each rank."""
    timeout = timeout_of(fault)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        signs = Path(directory)
        lab = stack.enter_context(Lab(job.world)) if setting.transport == "lab" else None
        relay = stack.enter_context(Relay(signs)) if setting.relay else None
        way = (setting.relay, relay.port) if setting.relay and relay else None
        stack.callback(lambda: end_orphans(signs.glob("children *"), _processes()))  # those of ranks that hang too
        ranks = stack.enter_context(
            _start(setting.transport, lab, Orders(job, fault, timeout, signs, setting.transport == "gloo", way))
        )
        if not worlds.wait_until(
            lambda: all((signs / f"ready {rank}").exists() for rank in range(job.world)), START
        ):
            raise Bad(HANG, f"not all ranks are ready after {START:g} s\n{ranks.output()}")
        if fault is not None and fault.kind in FROM_OUTSIDE:
            if not worlds.wait_until((signs / "now").exists, LIMIT):
                raise Bad(MISSED, f"the moment of the fault has not come\n{ranks.output()}")
            FROM_OUTSIDE[fault.kind](Scene(ranks, lab, relay, signs), fault)
            (signs / "done").touch()
        struck_down = fault.rank if fault is not None and fault.kind in ("stop", *DEATHS) else None
        survivors = [rank for rank in range(job.world) if rank != struck_down]
        if late := ranks.running(survivors, timeout + LIMIT):
            raise Bad(HANG, f"ranks {late} still run after {timeout + LIMIT:g} s\n{ranks.output()}")
        if relay is not None and relay.strike is not None and not relay.strike.done:
            raise Bad(MISSED, f"no bytes have come to the relay for {relay.strike}")
        _check_ends(ranks, survivors, fault, signs)
        return [_report(ranks, rank, fault, signs) for rank in range(job.world)]


def _check_ends(ranks: worlds.Ranks, survivors: Sequence[int], fault: Fault | None, signs: Path) -> None:
    """Ranks that were not struck down have ended in order, and have left no process: before all are reaped."""
    if fault is not None:
        end_orphans(signs.glob(f"children {fault.rank}"), _processes())
    if not isinstance(ranks, worlds.GlooRanks):  # mpiexec ends with its last rank
        return
    worlds.wait_until(lambda: all(ranks.gone(rank) for rank in survivors), 10)
    codes = {rank: ranks.processes[rank].exitcode for rank in survivors}
    if any(
        code and not (code == -signal.SIGABRT and _gloo_abort(rank, fault, signs)) for rank, code in codes.items()
    ):
        raise Bad(WRONG, f"exit codes are {codes}")
    stopped = {ranks.pid(fault.rank)} if fault is not None and fault.kind == "stop" else set()
    servers = {os.getpid(), *_servers()}
    worlds.wait_until(lambda: not _processes() - stopped - servers, 10)
    if left := _processes() - stopped - servers:
        raise Bad(LEAK, f"processes {left} are still there")


def _gloo_abort(rank: int, fault: Fault | None, signs: Path) -> str | None:
    """What gloo said when it ended a rank because of bytes that were changed; None if it has not."""
    said = gloo_stderr(signs, rank)
    if fault is None or fault.kind not in BYTE_FAULTS or fault.kind in HARMLESS or not said.exists():
        return None
    return next((line for line in said.read_text(errors="replace").splitlines() if _ENFORCED in line), None)


def _servers() -> set[int]:
    """What multiprocessing keeps for later ranks."""
    kept = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    return {pid for pid in kept if pid is not None}


def _start(transport: str, lab: Lab | None, orders: Orders) -> worlds.Ranks:
    if lab is not None:
        return LabRanks(lab, rank_of_case, (orders,))
    return worlds.start(transport, orders.job.world, rank_of_case, orders)


def _report(ranks: worlds.Ranks, rank: int, fault: Fault | None, signs: Path) -> Report:
    outcome = ranks.outcome(rank)
    if isinstance(outcome.value, Report):
        return outcome.value
    if abort := _gloo_abort(rank, fault, signs):
        now = float((signs / "now").read_text())
        return Report(error=GlooAbort(abort), struck=now if fault and rank == fault.rank else None)
    if fault is not None and rank == fault.rank and fault.kind in ("stop", *DEATHS) and (signs / "now").exists():
        return Report(error=Burned(fault.kind), struck=float((signs / "now").read_text()))
    return Report(error=outcome.error or RuntimeError(outcome.trace))


# From outside, when the moment has come.


@dataclass(frozen=True)
class Scene:
    """Where a fault happens."""

    ranks: worlds.Ranks
    lab: Lab | None
    relay: Relay | None
    signs: Path


def _wake_up(scene: Scene, fault: Fault) -> None:
    pid = scene.ranks.pid(fault.rank)
    worlds.wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", LIMIT)
    time.sleep(fault.seconds)
    os.kill(pid, signal.SIGCONT)


def _pull_cable(scene: Scene, fault: Fault) -> None:
    assert scene.lab is not None
    scene.lab.set_link(fault.rank, up=False)
    if harmless(fault):
        time.sleep(fault.seconds)
        scene.lab.set_link(fault.rank, up=True)


def _disturb_bytes(scene: Scene, fault: Fault) -> None:
    """Somewhere in the message that the rank is about to send, or in the sum that it is about to begin."""
    assert scene.relay is not None
    peer, size = fault.moment.peer, int((scene.signs / "size").read_text())
    link = ANY if peer == EVERYBODY else (fault.rank, peer)
    skip = random.Random(fault.seed).randrange(size)
    scene.relay.strike = Strike(fault.kind, link, skip, fault.seconds, fault.seed)


FROM_OUTSIDE: dict[str, Callable[[Scene, Fault], None]] = {
    "stop a while": _wake_up,
    **dict.fromkeys(LINKS, _pull_cable),
    **dict.fromkeys(BYTE_FAULTS, _disturb_bytes),
}
