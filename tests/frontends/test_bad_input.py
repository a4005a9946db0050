"""Bad input on one rank is an error on all of them at once, not a wait for the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oktopk
from tests.support import worlds
from tests.support.training import DDP, mlp

Make = Callable[[oktopk.Communicator | None, nn.Module, dict[str, Any]], object]


def wrapper(comm: oktopk.Communicator | None, model: nn.Module, options: dict[str, Any]) -> object:
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return oktopk.DistributedOptimizer(inner, model=model, comm=comm, **options)


def reducer(comm: oktopk.Communicator | None, model: nn.Module, options: dict[str, Any]) -> object:
    return oktopk.AllReducer(model.named_parameters(), comm=comm, **options)


def state(comm: oktopk.Communicator | None, model: nn.Module, options: dict[str, Any]) -> object:
    return oktopk.OkTopkState(**options).register(DDP(model))


class Other(nn.Sequential):
    """Other names than on the first rank."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.more = nn.Linear(2, 2)


BAD: dict[str, tuple[dict[str, Any], type[nn.Module] | None, str]] = {
    "density": ({"density": 2}, None, "density must be in (0, 1], got 2"),
    "algorithm": ({"algorithm": "best"}, None, "unknown algorithm 'best'"),
    "option": ({"densty": 0.1}, None, "did you mean 'density'?"),
    "buckets": ({"buckets": "small"}, None, "buckets must be"),
    "another density": ({"density": 0.5}, None, "ranks disagree on density"),
    "another hierarchy": ({"ranks_per_host": 2}, None, "ranks disagree on ranks_per_host"),
    "other parameters": ({}, Other, "ranks disagree on parameters"),
}
FRONT_ENDS: dict[str, Make] = {"optimizer": wrapper, "loop": reducer}


def outcome(make: Make, bad: str, comm: oktopk.Communicator | None, rank: int) -> tuple[str, str]:
    options, kind, _ = BAD[bad] if rank == 1 else ({}, None, "")
    try:
        make(comm, (kind or mlp)(), options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_bad_input_on_one_rank_is_an_error_on_all(front_end: str, bad: str) -> None:
    """No rank raises out of the job, which would wake the others: they must know by themselves."""
    found = oktopk.run_threads(3, lambda comm: outcome(FRONT_ENDS[front_end], bad, comm, comm.rank), timeout=10)
    judge(bad, found)


def judge(bad: str, found: list[tuple[str, str]]) -> None:
    said = BAD[bad][2]
    for rank, (kind, text) in enumerate(found):
        assert said in text, (rank, text)
        assert kind == ("TypeError" if bad == "option" and rank == 1 else "ValueError")
        if "disagree" not in said and rank != 1:
            assert text.startswith("on rank 1: ")


def on_processes(connect: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    rank = torch.distributed.get_rank()
    return {bad: outcome(state, bad, None, rank) for bad in BAD if bad != "other parameters"}


def test_bad_input_to_the_hook_on_one_rank_is_an_error_on_all() -> None:
    """The timeout is the default, 300 s: a test that waits for it does not pass."""
    begun = time.monotonic()
    ranks = worlds.run("gloo", 2, on_processes)
    for bad in ranks[0]:
        judge(bad, [rank[bad] for rank in ranks])
    assert time.monotonic() - begun < 300
