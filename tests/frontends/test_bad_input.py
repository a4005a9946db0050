"""Bad input on one rank is an error on all of them at once, not a wait for the timeout."""

from __future__ import annotations

import resource
import sys
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
    "sinks": ({"sinks": [print]}, None, "sinks must have emit() and close(), got"),
    "one sink": ({"sinks": 5}, None, "sinks must be a list of sinks, got int"),
    "trainer": ({"trainer": "trainer"}, None, "cannot record metrics in str.sparsities"),
    "buckets": ({"buckets": "small"}, None, "buckets must be"),
    "another density": ({"density": 0.5}, None, "ranks disagree on density"),
    "another hierarchy": ({"ranks_per_host": 2}, None, "ranks disagree on ranks_per_host"),
    "other parameters": ({}, Other, "ranks disagree on parameters"),
}
TYPES = ("option", "sinks", "one sink", "trainer")
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
        assert kind == ("TypeError" if bad in TYPES and rank == 1 else "ValueError")
        if "disagree" not in said and rank != 1:
            assert text.startswith("on rank 1: ")


def on_processes(connect: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    rank = torch.distributed.get_rank()
    return {bad: outcome(state, bad, None, rank) for bad in BAD if bad != "other parameters"}


def test_bad_input_to_the_hook_on_one_rank_is_an_error_on_all() -> None:
    """The timeout is the process group's own, torch's 30 minutes: a test that waits for it does not pass."""
    begun = time.monotonic()
    ranks = worlds.run("gloo", 2, on_processes)
    for bad in ranks[0]:
        judge(bad, [rank[bad] for rank in ranks])
    assert time.monotonic() - begun < 300


TIMEOUTS = ["5", -1.0, 0, float("nan"), float("inf"), True]


def with_timeouts(connect: Callable[..., Any]) -> list[tuple[str, str]]:
    """What is wrong on rank 1 only; the last time it may open too few files."""
    rank, found = torch.distributed.get_rank(), []
    makers: list[Make] = [wrapper, reducer, state]
    for number, bad in enumerate(TIMEOUTS):
        options = {"timeout": bad if rank == 1 else 600.0}
        try:
            makers[number % 3](None, mlp(), options)
            found.append(("no error", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    try:
        reducer(None, mlp(), {"timeout": 600.0})
        found.append(("no error", ""))
    except Exception as error:
        found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_rank_that_must_not_connect_still_meets_the_others() -> None:
    """They would wait for it: 600 s each time."""
    begun = time.monotonic()
    first, second = worlds.run("gloo", 2, with_timeouts)
    assert time.monotonic() - begun < 300
    for bad, here, there in zip(TIMEOUTS, first, second, strict=False):
        said = f"timeout must be a number of seconds above 0 and up to 1e+09, got {bad!r}"
        assert (here, there) == (("ValueError", f"on rank 1: {said}"), ("ValueError", said))
    assert first[-1] == second[-1]
    assert first[-1][0] == "CommError"
    assert first[-1][1].startswith("rank 1: this rank needs about ")
