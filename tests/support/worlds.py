"""Worlds of real processes to run a job on: ranks of a gloo process group, or of mpiexec.

A job is a function of some module, job(connect, *args). connect(timeout=…) makes a communicator of its own for
this rank; like every setup it is collective. What the job returns, or the error it ends with, is the rank's
Outcome. No process outlives the `with` block of its world.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import oktopk
from tests.support.paths import ROOT

SIZES = (1, 2, 3, 4, 5, 7, 8)

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["tests.support.preload"])


@dataclass(frozen=True)
class Outcome:
    """How a job went on one rank."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # gone in between, or a system without /proc
        return not Path("/proc").exists()


class Ranks(ABC):
    """The processes of one world, under way."""

    def __init__(self, size: int, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.size = size
        self._temporary = tempfile.TemporaryDirectory(prefix="oktopk-world-")
        self.directory = Path(self._temporary.name)
        self.launch(job, args)

    @abstractmethod
    def launch(self, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start the ranks."""

    @abstractmethod
    def reap(self) -> None:
        """End whatever is left of them."""

    @abstractmethod
    def gone(self, rank: int) -> bool:
        """Whether a rank has ended."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(self.size):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid = int(self._file(rank, "pid").read_text())
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)
        self.reap()
        self._temporary.cleanup()

    def pid(self, rank: int, timeout: float = 60) -> int:
        path = self._file(rank, "pid")
        wait_until(lambda: path.exists() or self.gone(rank), timeout)
        assert path.exists(), f"rank {rank} did not start\n{self.output()}"
        return int(path.read_text())

    def running(self, ranks: Iterable[int], timeout: float) -> list[int]:
        """Wait for the ranks to end; which have not."""
        deadline = time.monotonic() + timeout
        pids = {rank: self.pid(rank, timeout) for rank in ranks}
        wait_until(lambda: not any(map(is_running, pids.values())), deadline - time.monotonic())
        return [rank for rank, pid in pids.items() if is_running(pid)]

    def outcome(self, rank: int) -> Outcome:
        path = self._file(rank, "outcome")
        return pickle.loads(path.read_bytes()) if path.exists() else Outcome(trace="ended without a report")

    def output(self) -> str:
        return ""

    def _file(self, rank: int, kind: str) -> Path:
        return self.directory / f"{rank}.{kind}"


def start_forkserver() -> None:
    """If it does not run yet. It finds what it imports from any working directory."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def forked(target: Callable[..., Any], *args: Any) -> Any:
    """A process, to be started, of what the server has in memory; it may have children."""
    start_forkserver()
    return _FORKSERVER.Process(target=target, args=args)


class GlooRanks(Ranks):
    """Forked from a server that has torch in memory already; they meet in a file."""

    def launch(self, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.processes = [
            _FORKSERVER.Process(target=_gloo_rank, args=(self.directory, r, self.size, job, args), daemon=True)
            for r in range(self.size)
        ]
        start_forkserver()
        for process in self.processes:
            process.start()

    def gone(self, rank: int) -> bool:
        return self.processes[rank].exitcode is not None

    def reap(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


class MPIRanks(Ranks):
    """Started by the mpiexec that was installed together with this interpreter."""

    def __init__(self, size: int, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        need_mpi()
        super().__init__(size, job, args)

    def launch(self, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        (self.directory / "job").write_bytes(pickle.dumps((job, args)))
        code = f"import sys; from {__name__} import _mpi_rank; _mpi_rank(sys.argv[1])"
        program = [sys.executable, "-c", code, str(self.directory)]
        self._output = (self.directory / "output").open("wb")
        self.mpiexec = subprocess.Popen(
            [str(mpiexec()), "-n", str(self.size), *program],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def gone(self, rank: int) -> bool:
        return self.mpiexec.poll() is not None

    def reap(self) -> None:
        try:
            self.mpiexec.wait(10)
        except subprocess.TimeoutExpired:
            self.mpiexec.kill()
            self.mpiexec.wait(10)
        self._output.close()

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")[-3000:]


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def has_mpi() -> bool:
    return mpiexec() is not None and importlib.util.find_spec("mpi4py") is not None


def need_mpi() -> None:
    if not has_mpi():
        pytest.skip("needs mpi4py and mpiexec: pip install 'oktopk[mpi]'")


def start(transport: str, size: int, job: Callable[..., Any], *args: Any) -> Ranks:
    return {"gloo": GlooRanks, "mpi": MPIRanks}[transport](size, job, args)


def run(transport: str, size: int, job: Callable[..., Any], *args: Any, timeout: float = 80) -> list[Any]:
    """What the job returns on each rank; an error on any of them is an AssertionError that shows them all."""
    with start(transport, size, job, *args) as ranks:
        late = ranks.running(range(size), timeout)
        outcomes = [ranks.outcome(rank) for rank in range(size)]
        failures = [f"rank {r} of {size}: {outcome.trace}" for r, outcome in enumerate(outcomes) if outcome.trace]
        failures += [f"rank {r} of {size} was still running after {timeout:g} s" for r in late]
        assert not failures, "\n".join([*failures, ranks.output()])
        return [outcome.value for outcome in outcomes]


# In the rank's own process.


def make_thread_pool() -> None:
    """torch's own is lost in a fork, and two threads that both make it anew fail with "Invalid thread pool"."""
    torch.set_num_threads(torch.get_num_threads())


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, for somebody who may be looking."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def _run_job(
    directory: Path, rank: int, connect: Callable[..., Any], job: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    """The exit code. Nothing that the job has made is kept."""
    torch.set_num_threads(
        torch.get_num_threads()
    )  # its pool is lost in the fork: made by one thread, not by several
    _write(directory / f"{rank}.pid", str(os.getpid()).encode())
    try:
        outcome = Outcome(value=job(connect, *args))
    except BaseException as error:
        outcome = Outcome(error=error, trace=traceback.format_exc())
    _write(directory / f"{rank}.outcome", pickle.dumps(outcome))
    return int(outcome.error is not None)


def _gloo_rank(directory: Path, rank: int, size: int, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    make_thread_pool()
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))

    def connect(**options: Any) -> oktopk.GroupCommunicator:
        group = dist.new_group()
        dist.barrier(group)  # who hung up now would break the connecting of others
        return oktopk.GroupCommunicator(group, **options)

    code = _run_job(directory, rank, connect, job, args)
    gc.collect()
    dist.destroy_process_group()  # a forked process skips what an ordinary one does at its end: do it here
    sys.exit(code)


def _mpi_rank(path: str) -> None:
    from mpi4py import MPI

    directory = Path(path)
    job, args = pickle.loads((directory / "job").read_bytes())
    code = _run_job(directory, MPI.COMM_WORLD.Get_rank(), oktopk.MPICommunicator, job, args)
    # A rank that has met a timeout aborts all others as it ends: let them report first.
    reports = [directory / f"{rank}.outcome" for rank in range(MPI.COMM_WORLD.Get_size())]
    wait_until(lambda: all(report.exists() for report in reports), 6)
    sys.exit(code)
