"""Processes of which several act as one host: the front ends agree, no mass is lost, and an end is everybody's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import oktopk
from oktopk import CommError
from oktopk.engine.hierarchy import local_group, shared_memory
from oktopk.engine.hierarchy.local_group import LocalGroup
from tests.support import worlds
from tests.support.training import (
    DDP,
    Mass,
    Run,
    hook_up,
    mlp,
    same_bits,
    sgd,
    weigh,
    with_hook,
    with_loop,
    with_wrapper,
)

OPTIONS: dict[str, Any] = {"density": 0.05, "warmup_steps": 3, "auto": False, "timeout": 30.0}
TRANSPORTS = ["memory", "messages"]
FRONT_ENDS = {"hook": with_hook, "wrapper": with_wrapper, "loop": with_loop}


def use(transport: str) -> None:
    """How ranks of a host hand tensors to each other, in this process."""
    if transport == "messages":
        local_group.find_problem = lambda links, members: "there is none in this test"


def front_ends(connect: Callable[..., Any], ranks: int, transport: str) -> dict[str, Run]:
    use(transport)
    return {name: run("model", 15, ranks_per_host=ranks, **OPTIONS) for name, run in FRONT_ENDS.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world", "ranks"), [(4, 2), (3, 3), (6, 2)])
def test_the_front_ends_end_with_the_same_bits(world: int, ranks: int, transport: str) -> None:
    found = worlds.run("gloo", world, front_ends, ranks, transport)
    runs = [run for of_rank in found for run in of_rank.values()]
    for run in runs:
        assert run.sparse_steps == 12
        assert same_bits(run.parameters, runs[0].parameters)


def mass(connect: Callable[..., Any], ranks: int, transport: str) -> Mass:
    """In DDP's own buckets, which it arranges anew after the first step."""
    use(transport)
    net = DDP(mlp(), bucket_cap_mb=0.003)
    optimizer = sgd(net)
    with hook_up(net, optimizer, ranks_per_host=ranks) as state:
        return weigh(net, optimizer, state, 12)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world", "ranks"), [(4, 2), (6, 2)])
def test_no_mass_is_lost_in_the_buckets_of_ddp(world: int, ranks: int, transport: str) -> None:
    of_ranks: list[Mass] = worlds.run("gloo", world, mass, ranks, transport)
    hosts = world // ranks
    for rank, one in enumerate(of_ranks):
        assert bool(one.residual) == (rank % ranks == 0)

    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0)

    for size, applied in of_ranks[0].applied.items():
        given = total([one.given[size] for one in of_ranks]) / ranks
        stayed = total([one.residual[size] for one in of_ranks[::ranks]])
        scale = total([one.magnitude[size] for one in of_ranks]).max().item()
        torch.testing.assert_close(stayed + hosts * applied, given, rtol=0, atol=2.0**-18 * scale)


# Disasters.

P, RANKS, TIMEOUT, SLACK, LONG = 4, 2, 5.0, 30.0, 80.0


def burn() -> None:
    raise RuntimeError("disk on fire")


DISASTERS: dict[str, Callable[[], None]] = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": burn,
}


def train_until(connect: Callable[..., Any], victim: int, timeout: float, disaster: str, folder: Path) -> None:
    """The victim's disaster comes when its host averages a bucket of the fourth step."""
    oktopk.sparse_allreduce(torch.ones(2000), 0.05, comm=connect(timeout=60.0))  # compiles the kernels
    shared_memory._FOLDER = folder / "memory"
    reduce, calls = LocalGroup.reduce, 0

    def reduce_or_not(self: LocalGroup, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5 and dist.get_rank() == victim:
            (folder / "happened").touch()
            DISASTERS[disaster]()
        reduce(self, *args)

    LocalGroup.reduce = reduce_or_not  # type: ignore[method-assign]
    end = time.monotonic() + 2 * LONG
    while time.monotonic() < end:
        with_loop("model", 1000, **OPTIONS | {"timeout": timeout, "ranks_per_host": RANKS})


@pytest.mark.parametrize("victim", [2, 3], ids=["leader", "member"])
@pytest.mark.parametrize("disaster", DISASTERS)
def test_the_end_of_one_rank_is_that_of_all(victim: int, disaster: str, tmp_path: Path) -> None:
    happened, survivors = tmp_path / "happened", [rank for rank in range(P) if rank != victim]
    timeout, patience = (LONG, LONG / 2) if disaster == "raises" else (TIMEOUT, TIMEOUT + SLACK)
    (tmp_path / "memory").mkdir()
    with worlds.start("gloo", P, train_until, victim, timeout, disaster, tmp_path) as ranks:
        assert worlds.wait_until(lambda: happened.exists() or ranks.gone(victim), 60)
        assert happened.exists(), ranks.outcome(victim).trace
        assert ranks.running(survivors, patience) == []
        for survivor in map(ranks.outcome, survivors):
            assert isinstance(survivor.error, CommError), survivor.trace
            assert f"rank {victim}" in str(survivor.error).rpartition(" (rank")[0], survivor.trace
            if disaster == "raises":
                assert "RuntimeError: disk on fire" in str(survivor.error)
    assert not list((tmp_path / "memory").iterdir())
