"""A stranger who knows the ports of a local job: it listens on loopback only, and its notes cannot be forged,
neither before the ranks have met nor after."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oktopk.utils.processes import Process, local_world, start_processes
from tests.support.sockets import listening
from tests.support.worlds import wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc/net of Linux"),
]
PATIENCE = 90.0
JOB = """
import os, sys, time
import torch, torch.distributed as dist
import oktopk
rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
comm = oktopk.GroupCommunicator.exclusive(timeout=120)
open(f"{folder}/ready{rank}", "w").close()
for step in range(1000):
    time.sleep(1.5 * rank)  # rank 0 waits for so long that it looks for notes
    end = torch.tensor([float(os.path.exists(f"{folder}/end"))])
    comm.all_reduce_(end, "end")
    assert comm.all_gather_ints([rank], "ranks") == [[0], [1]]
    if end:
        break
comm.close()
dist.destroy_process_group()
print("finished")
"""


@contextmanager
def job(folder: Path) -> Iterator[tuple[list[subprocess.Popen[bytes]], dict[str, str]]]:
    """Two ranks that are connected, and the environment of one of them."""
    command = [sys.executable, "-c", JOB, str(folder)]
    with (
        local_world(2) as world,
        start_processes(command, [Process(rank, subprocess.PIPE, subprocess.PIPE) for rank in world]) as (
            ranks,
            _,
        ),
    ):
        ready = [folder / f"ready{rank}" for rank in range(2)]
        assert wait_until(lambda: all(path.exists() for path in ready), PATIENCE)
        yield ranks, world[0]


SLOW_START = """
import os, time
import torch, torch.distributed as dist
import oktopk
from oktopk.comm.tcp import rendezvous
rank, introduce = int(os.environ["RANK"]), rendezvous.introduce
def late(*args):
    time.sleep(4 * rank)  # a slow resolver: rank 0 waits for so long that it would look for notes
    return introduce(*args)
rendezvous.introduce = late
dist.init_process_group("gloo")
comm = oktopk.GroupCommunicator.exclusive(timeout=120)
x = torch.ones(1)
comm.all_reduce_(x, "sum")
assert x == 2
comm.close()
dist.destroy_process_group()
print("finished")
"""


@pytest.mark.parametrize("secret", [True, False])
def test_a_stranger_cannot_end_a_job_that_has_not_met(secret: bool) -> None:
    """The notes are in the store before the ranks come, where their communicator will look for them."""
    with local_world(2) as world:
        store = dist.TCPStore("127.0.0.1", int(world[0]["MASTER_PORT"]), is_master=False)
        for what, note in (("trouble", "- ?"), ("failed", "- rank 1 failed: forged"), ("failed/1", "- 0")):
            store.set(f"default_pg/0//oktopk/0/0-1/1/{what}", note)
        environments = [
            rank if secret else {k: v for k, v in rank.items() if k != "OKTOPK_SECRET"} for rank in world
        ]
        started = [Process(rank, subprocess.PIPE, subprocess.PIPE) for rank in environments]
        with start_processes([sys.executable, "-c", SLOW_START], started) as (ranks, _):
            outputs = [rank.communicate(timeout=PATIENCE) for rank in ranks]
            keys = {key.removesuffix("/0/0") for key in store.list_keys() if "oktopk" in key}
    assert "default_pg/0//oktopk/0/0-1/1" in keys  # the stranger has found the right place
    assert [out for out, _ in outputs] == [b"finished\n"] * 2, outputs


def finish(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    (folder / "end").touch()
    outputs = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    assert [out for out, _ in outputs] == [b"finished\n"] * 2, outputs


def test_a_local_job_listens_on_loopback_only(tmp_path: Path) -> None:
    with job(tmp_path) as (ranks, environment):
        found = set.union(*(listening(pid) for pid in (os.getpid(), *(rank.pid for rank in ranks))))
        assert int(environment["MASTER_PORT"]) in {port for _, port in found}
        assert {address for address, _ in found} == {"127.0.0.1"}
        finish(ranks, tmp_path)


def note_keys(store: Any) -> list[str]:
    """Where ranks would leave notes: the keys of the job's store tell how its communicators are called."""
    name = "oktopk/0/0-1/1"
    beside = next(key.split("oktopk/")[0] for key in store.list_keys() if "oktopk/" in key)
    return [beside + f"{name}/{what}" for what in ("failed", "trouble", "failed/0", "failed/1", "trouble/0")]


def test_a_stranger_finds_no_secret_and_ends_nothing(tmp_path: Path) -> None:
    """Through the store of the job and every port: it reads all keys, forges notes, and stays in the line."""
    with job(tmp_path) as (ranks, environment):
        store = dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False)
        for key in store.list_keys():
            assert environment["OKTOPK_SECRET"].encode() not in store.get(key), key
        for key in note_keys(store):
            for note in ("rank 1 failed: forged", f"{'0' * 64} ?", "- ?", "- 1"):
                store.set(key, note)
        ports = {port for rank in ranks for _, port in listening(rank.pid)}
        silent = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(50)]
        time.sleep(4)  # two looks at the notes, at least
        assert [rank.poll() for rank in ranks] == [None, None]
        finish(ranks, tmp_path)
        for connection in silent:
            connection.close()
