"""How this process became a rank: alone, by torchrun, mpirun or srun; and how to start ranks on this machine."""

from __future__ import annotations

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
from oktopk.utils.processes import Process, local_world, started

from .config.options import ConfigError
from .together import is_raised_by_all

log = logging.getLogger(__name__)

_POLL = 0.05
GRACE = 60.0
"""Seconds that ranks have to save and end, or to notice that another one has failed."""


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and who said so."""

    how: str
    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1


@dataclass(frozen=True)
class _Launcher:
    """The variables by which a launcher tells a process who it is."""

    how: str
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


def find_place(environment: Mapping[str, str], nwpernode: int | None = None) -> Place:
    """What the environment says; a process that nobody has started as a rank is alone.

    >>> find_place({"PMI_RANK": "1", "PMI_SIZE": "3"})
    Place(how='MPI', rank=1, world=3, local_rank=1, local_world=3)
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in environment and launcher.world in environment:
            rank, world = int(environment[launcher.rank]), int(environment[launcher.world])
            per_host = int(environment.get(launcher.local_world, nwpernode or world))
            local = int(environment.get(launcher.local_rank, rank % per_host))
            return Place(environment.get(_OURS, launcher.how), rank, world, local, per_host)
    return Place("alone", 0, 1)


def restart_problem(environment: Mapping[str, str]) -> str | None:
    """Why torchrun may fail to start this job again, if it should have to."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not restarts or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        "after a restart ranks may find the addresses of those that died in torchrun's store: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"
    )


def check_world(place: Place, nworkers: int | None) -> None:
    if nworkers is not None and nworkers != place.world:
        real = "is 1 rank" if place.world == 1 else f"are {place.world} ranks"
        how = f"start {nworkers} by torchrun or mpirun, or on this machine by --ranks {nworkers}"
        raise ConfigError(f"--nworkers is {nworkers}, but there {real} ({place.how}): {how}")


@contextmanager
def joined(place: Place, timeout: float) -> Iterator[Communicator]:
    """A communicator over all ranks, for one thread; gone at the end."""
    _share_cores(place)
    if place.world == 1:
        yield alone()
        return
    if place.how == "MPI":
        comm: Communicator = MPICommunicator(timeout=timeout)
        with _told(comm):
            yield comm
        return
    if place.rank == 0 and (problem := restart_problem(os.environ)):
        log.warning(problem)
    if place.how == "srun":
        os.environ |= _rendezvous_of_slurm(place)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        comm = GroupCommunicator.exclusive(timeout=timeout)
        with _told(comm):
            yield comm
    finally:
        dist.destroy_process_group()


@contextmanager
def _told(comm: Communicator) -> Iterator[None]:
    """An error that ends this rank alone is told to the others."""
    try:
        yield
    except BaseException as error:
        if is_raised_by_all(error):
            comm.close()
        else:
            comm.fail(error)
        raise
    comm.close()


def _share_cores(place: Place) -> None:
    """Ranks of one machine share its cores; by default each would take all of them."""
    if "OMP_NUM_THREADS" not in os.environ and place.local_world > 1:
        torch.set_num_threads(_threads(place.local_world))


def _threads(ranks: int) -> int:
    """Of each of the ranks of this machine."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _rendezvous_of_slurm(place: Place) -> dict[str, str]:
    """The first host of the step, and a port that follows from the job's number."""
    first = _first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or "127.0.0.1")
    port = 20_000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20_000
    wanted = {"RANK": place.rank, "WORLD_SIZE": place.world, "MASTER_ADDR": first, "MASTER_PORT": port}
    return {name: os.environ.get(name, str(value)) for name, value in wanted.items()}


def _first_host(hosts: str) -> str:
    """Of a list as SLURM writes it.

    >>> _first_host("node[007-012,020],other3"), _first_host("a1,a2")
    ('node007', 'a1')
    """
    found = re.match(r"([^,\[]+)(?:\[([^],-]+))?", hosts)
    return hosts if found is None else found[1] + (found[2] or "")


def run_ranks(count: int, command: Sequence[str]) -> int:
    """Start ranks of this command on this machine, and end with the exit code of the first that failed.

    Ctrl-C, SIGTERM and the end of the terminal are passed on: ranks then save and end by themselves.
    """
    own = {_OURS: STARTED_BY_RANKS, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads(count)))}
    with (
        local_world(count) as world,
        started(command, [Process({**rank, **own}) for rank in world]) as (processes, _),
    ):
        code = _first_failure(processes)
        for process in processes:
            if process.poll() is None:
                log.warning("rank process %d does not end: it is killed", process.pid)
        return code


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all; after a failure the others have some time to end by themselves."""
    code, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        failed = [process.returncode for process in processes if process.poll()]
        if failed and not code:
            code, deadline = failed[0], time.monotonic() + GRACE
        time.sleep(_POLL)
    codes = [process.poll() for process in processes]
    code = code or next((code for code in codes if code), 0)
    return 128 - code if code < 0 else code
