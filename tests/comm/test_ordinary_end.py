"""Processes as torchrun starts them: when one is killed, the others end by their error, not by a crash at exit."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machine import free_port

P, TIMEOUT, PATIENCE = 3, 5.0, 90.0

JOB = f"""
import os, signal, sys, torch, torch.distributed as dist, oktopk
victim = int(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(50, 40)
oktopk.sparse_allreduce(torch.ones(2000), 0.05)  # compiles the kernels
reducer = oktopk.AllReducer(model.named_parameters(), density=0.1, warmup_steps=2, auto=False, timeout={TIMEOUT})
for step in range(1000):
    if rank == victim and step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    reducer.sync({{name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}})
"""


@pytest.mark.parametrize("victim", [0, 2], ids=["which has the store", "which has not"])
def test_a_rank_that_is_killed_ends_the_others_by_an_error(victim: int, tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(P)}
    command = [sys.executable, "-c", JOB, str(victim)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(P):
            output = stack.enter_context((tmp_path / str(rank)).open("w"))
            env = os.environ | meeting | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        ends = [rank.wait(PATIENCE) for rank in ranks]
    said = [(tmp_path / str(rank)).read_text() for rank in range(P)]
    assert ends == [-9 if rank == victim else 1 for rank in range(P)], "\n".join(said)
    for rank in set(range(P)) - {victim}:
        last = said[rank].strip().splitlines()[-1]
        assert "oktopk.errors." in last, said[rank]  # torch may put the rank before it
        what, _, who = last.rpartition(" (rank ")
        assert re.fullmatch(rf"{rank}, step [56]\)", who), said[rank]  # somebody may be a step behind
        if victim:  # without the store nobody can tell who has only hung up
            assert f"rank {victim}" in what, said[rank]
