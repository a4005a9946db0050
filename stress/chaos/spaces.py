"""Ranks on the hosts of a lab: forked like other gloo ranks, each into the network namespace of its host."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import oktopk
from oktopk.tools.lab import Lab
from tests.support import worlds
from tests.support.labs import SPACES, spaces_of

_NEW_NETWORK = 0x40000000
_PORT = 29500


class LabRanks(worlds.GlooRanks):
    """Their store is on host 0, behind its link: who is cut off from it cannot read what others leave there."""

    def __init__(self, lab: Lab, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.lab = lab
        self.spaces = [SPACES / name for name in spaces_of(os.getpid()) if "-host" in name]
        super().__init__(len(lab.addresses), job, args)

    def launch(self, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.processes = [
            worlds._FORKSERVER.Process(
                target=_rank,
                args=(self.directory, rank, self.spaces, self.lab.addresses[0], job, args),
                daemon=True,
            )
            for rank in range(self.size)
        ]
        for process in self.processes:
            process.start()


def _rank(
    directory: Path, rank: int, spaces: list[Path], master: str, job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _enter(spaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    seconds = timedelta(seconds=60)
    store = dist.TCPStore(master, _PORT, len(spaces), is_master=rank == 0, timeout=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(spaces), timeout=seconds)

    def connect(**options: Any) -> oktopk.GroupCommunicator:
        return oktopk.GroupCommunicator.exclusive(**options)

    code = worlds._run_job(directory, rank, connect, job, args)
    gc.collect()
    dist.destroy_process_group()
    sys.exit(code)


def _enter(space: Path) -> None:
    """The calling thread, and all that it starts from now on, are in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with space.open() as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
