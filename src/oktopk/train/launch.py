"""Find out which rank this process is (alone, torchrun, mpirun or srun), connect ranks, and start local ones."""

from __future__ import annotations

import hmac
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from oktopk.comm import Communicator, GroupCommunicator, MPICommunicator, alone
from oktopk.errors import CommError
from oktopk.utils.processes import Process, local_world, start_processes
from oktopk.utils.secret import SECRET, read_secret

from .collective_errors import is_collective
from .config.options import ConfigError

log = logging.getLogger(__name__)

_POLL = 0.05
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below those that the system gives to connections."""
GRACE = 60.0
"""Seconds for ranks to save and exit after another rank has failed."""


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is, and which launcher says so."""

    launcher: str
    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1


@dataclass(frozen=True)
class _Launcher:
    """The environment variables that a launcher sets."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str


_OURS, STARTED_BY_RANKS = "OKTOPK_STARTED_BY", "--ranks"
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        *("MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def detect_rank(environment: Mapping[str, str], nwpernode: int | None = None) -> RankInfo:
    """Read the rank from the launcher's environment variables; without a launcher, this process is alone.

    >>> detect_rank({"PMI_RANK": "1", "PMI_SIZE": "3"})
    RankInfo(launcher='MPI', rank=1, world=3, local_rank=1, local_world=3)
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in environment and launcher.world in environment:
            rank, world = int(environment[launcher.rank]), int(environment[launcher.world])
            per_host = int(environment.get(launcher.local_world, nwpernode or world))
            local = int(environment.get(launcher.local_rank, rank % per_host))
            return RankInfo(environment.get(_OURS, launcher.name), rank, world, local, per_host)
    return RankInfo("alone", 0, 1)


def restart_problem(environment: Mapping[str, str]) -> str | None:
    """Return why torchrun may fail to restart this job, or None."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not restarts or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        "after a restart, torchrun's store may still hold the addresses of dead ranks: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"
    )


def check_world(info: RankInfo, nworkers: int | None) -> None:
    if nworkers is not None and nworkers != info.world:
        real = "is 1 rank" if info.world == 1 else f"are {info.world} ranks"
        remedy = f"start {nworkers} with torchrun or mpirun, or on this machine with --ranks {nworkers}"
        raise ConfigError(f"--nworkers is {nworkers}, but there {real} ({info.launcher}): {remedy}")


@contextmanager
def connect(info: RankInfo, timeout: float) -> Iterator[Communicator]:
    """Connect all ranks; yields a communicator for one thread and closes it at the end."""
    _share_cores(info)
    if info.world == 1:
        yield alone()
        return
    if info.launcher == "MPI":
        comm: Communicator = MPICommunicator(timeout=timeout)
        with _report_failure(comm):
            yield comm
        return
    if info.rank == 0 and (problem := restart_problem(os.environ)):
        log.warning(problem)
    if info.launcher == "srun":
        os.environ |= _slurm_rendezvous(info)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with _hinting_at_the_secret(info):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        comm = GroupCommunicator.exclusive(timeout=timeout)
        with _report_failure(comm):
            yield comm
    finally:
        dist.destroy_process_group()


@contextmanager
def _hinting_at_the_secret(info: RankInfo) -> Iterator[None]:
    """Under srun, ranks with different secrets look for each other at different ports."""
    try:
        yield
    except RuntimeError as error:
        if info.launcher != "srun":
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CommError(
            f"rank {info.rank} did not meet the others at {place}: {str(error).splitlines()[0]}. Do all ranks "
            f"have the same {SECRET}? Under srun the port depends on it"
        ) from error


@contextmanager
def _report_failure(comm: Communicator) -> Iterator[None]:
    """If this rank fails alone, send its error to the other ranks."""
    try:
        yield
    except BaseException as error:
        if is_collective(error):
            comm.close()
        else:
            comm.fail(error)
        raise
    comm.close()


def _share_cores(info: RankInfo) -> None:
    """Divide the cores among the ranks of this machine; by default each would use all of them."""
    if "OMP_NUM_THREADS" not in os.environ and info.local_world > 1:
        torch.set_num_threads(_threads(info.local_world))


def _threads(ranks: int) -> int:
    """Threads for each of the ranks of this machine."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _slurm_rendezvous(info: RankInfo) -> dict[str, str]:
    """Use the first host of the job step, and a port that differs between steps.

    With a secret, others cannot compute the port. They can still find it; docs/security.md says what protects the
    job then.
    """
    first = _first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or "127.0.0.1")
    step = "/".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"))
    try:
        digest = hmac.digest(read_secret() or b"oktopk", step.encode(), "sha256")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    port = _FIRST_PORT + int.from_bytes(digest[:8], "big") % _PORTS
    wanted = {"RANK": info.rank, "WORLD_SIZE": info.world, "MASTER_ADDR": first, "MASTER_PORT": port}
    return {name: os.environ.get(name, str(value)) for name, value in wanted.items()}


def _first_host(hosts: str) -> str:
    """The first host of a SLURM node list.

    >>> _first_host("node[007-012,020],other3"), _first_host("a1,a2")
    ('node007', 'a1')
    """
    found = re.match(r"([^,\[]+)(?:\[([^],-]+))?", hosts)
    return hosts if found is None else found[1] + (found[2] or "")


def run_ranks(count: int, command: Sequence[str]) -> int:
    """Run this command as `count` ranks on this machine; return the exit code of the first that failed.

    Ctrl-C, SIGTERM and SIGHUP are forwarded: the ranks then save and exit.
    """
    own = {_OURS: STARTED_BY_RANKS, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads(count)))}
    with (
        local_world(count) as world,
        start_processes(command, [Process({**rank, **own}) for rank in world]) as (processes, _),
    ):
        code = _first_failure(processes)
        for process in processes:
            if process.poll() is None:
                log.warning("rank process %d does not exit: killing it", process.pid)
        return code


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; after a failure, give the others GRACE seconds to exit."""
    code, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        failed = [process.returncode for process in processes if process.poll()]
        if failed and not code:
            code, deadline = failed[0], time.monotonic() + GRACE
        time.sleep(_POLL)
    codes = [process.poll() for process in processes]
    code = code or next((code for code in codes if code), 0)
    return 128 - code if code < 0 else code
