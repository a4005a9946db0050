"""Front ends whose ranks die, stop or fail in the middle of a step: the others end with an error that says why."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk import Aborted, CommError, CommTimeout
from oktopk.engine.step import StepReducer
from tests.support import worlds

P, VICTIM, SURVIVORS = 3, 1, (0, 2)
TIMEOUT, SLACK = 5.0, 30.0
LONG = 80.0
"""A timeout that nobody waits for: who ends before it has been told."""
WARMUP, LAST_STEP = 2, 5
"""The disaster happens in a sparse step, or in a dense one if the warm-up is longer."""
DENSE_DDP = "ddp in a dense step"
ONE_BUCKET = "ddp in a dense step of one bucket"
OPTIONS: dict[str, Any] = {"density": 0.05, "warmup_steps": WARMUP, "auto": False}

Step = Callable[[], None]


# The front ends: each makes a training step of a model in several buckets.


def make_model() -> nn.Sequential:
    """Has buffers too, which DDP broadcasts by itself in every step."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()


def with_ddp(timeout: float, warmup: int = WARMUP, bucket_mb: float = 0.1, auto: bool = False) -> Step:
    own = dist.new_group(timeout=timedelta(seconds=timeout))
    model = DistributedDataParallel(make_model(), process_group=own, bucket_cap_mb=bucket_mb)
    options = OPTIONS | {"warmup_steps": warmup, "auto": auto}
    oktopk.OkTopkState(own, timeout=timeout, **options).register(model)
    return lambda: backward(model)


def with_optimizer(timeout: float) -> Step:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.01)
    optimizer = oktopk.DistributedOptimizer(inner, model=model, buckets=0.1, timeout=timeout, **OPTIONS)

    def step() -> None:
        backward(model)
        optimizer.step()

    return step


def with_loop(timeout: float) -> Step:
    model = make_model()
    reducer = oktopk.AllReducer(model.named_parameters(), buckets=0.1, timeout=timeout, **OPTIONS)

    def step() -> None:
        backward(model)
        reducer.sync({name: parameter.grad for name, parameter in model.named_parameters()})

    return step


FRONT_ENDS: dict[str, Callable[[float], Step]] = {
    "ddp": with_ddp,
    "optimizer": with_optimizer,
    "loop": with_loop,
}
DENSE: dict[str, Callable[[float], Step]] = {
    DENSE_DDP: lambda timeout: with_ddp(timeout, 10**9),
    ONE_BUCKET: lambda timeout: with_ddp(timeout, 10**9, 25.0, auto=True),
}
ALL = FRONT_ENDS | DENSE


# The disasters.


def burn() -> None:
    raise RuntimeError("disk on fire")


def send_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


DISASTERS: dict[str, Callable[[], None]] = {
    "is killed": lambda: send_signal(signal.SIGKILL),
    "is stopped": lambda: send_signal(signal.SIGSTOP),
    "raises": burn,  # in the worker
    "leaves": burn,  # in the main thread, between two steps
}


def in_the_worker(disaster: Step) -> None:
    """Let it happen in this process when the second bucket of the step comes, or, if there is none, the only one
    of the step after it."""
    begun, reduce = Counter[int](), StepReducer.reduce

    def reduce_or_not(self: StepReducer, *args: Any) -> None:
        begun[self.step] += 1
        if (self.step, begun[self.step]) in ((LAST_STEP, 2), (LAST_STEP + 1, 1)):
            disaster()
        reduce(self, *args)

    StepReducer.reduce = reduce_or_not  # type: ignore[method-assign]


def train(connect: Callable[..., Any], front_end: str, timeout: float, disaster: str, happened: Path) -> None:
    """Train for longer than anybody waits; the victim's disaster comes in the middle."""

    def leave_word_and_fail() -> None:
        happened.touch()
        DISASTERS[disaster]()

    victim = dist.get_rank() == VICTIM
    oktopk.sparse_allreduce(torch.ones(2000), 0.05, comm=connect(timeout=60.0))  # compiles the kernels
    if victim and disaster != "leaves":
        in_the_worker(leave_word_and_fail)
    step, end, done = ALL[front_end](timeout), time.monotonic() + 2 * LONG, 0
    while time.monotonic() < end:
        if victim and disaster == "leaves" and done == LAST_STEP:
            leave_word_and_fail()
        step()
        done += 1


@dataclass(frozen=True)
class Ending:
    """What became of the ranks."""

    victim: worlds.Outcome
    survivors: list[worlds.Outcome]

    def assert_known(self) -> None:
        """Every survivor says which rank is to blame."""
        for survivor in self.survivors:
            assert isinstance(survivor.error, CommError), survivor.trace
            assert f"rank {VICTIM}" in str(survivor.error).rpartition(" (rank")[0], survivor.trace


def ending(front_end: str, disaster: str, directory: Path, timeout: float, patience: float) -> Ending:
    """Train until the disaster; the others end within `patience`."""
    happened = directory / "happened"
    with worlds.start("gloo", P, train, front_end, timeout, disaster, happened) as ranks:
        assert worlds.wait_until(lambda: happened.exists() or ranks.gone(VICTIM), 60)
        assert happened.exists(), ranks.outcome(VICTIM).trace
        assert ranks.running(SURVIVORS, patience) == []
        return Ending(ranks.outcome(VICTIM), [ranks.outcome(rank) for rank in SURVIVORS])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_others_of_a_killed_rank_end_in_time(front_end: str, tmp_path: Path) -> None:
    ending(front_end, "is killed", tmp_path, TIMEOUT, TIMEOUT + SLACK).assert_known()


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_stopped_rank_is_a_timeout(front_end: str, tmp_path: Path) -> None:
    """The first to give up has met its timeout; it tells the others, who may not have met theirs."""
    end = ending(front_end, "is stopped", tmp_path, TIMEOUT, TIMEOUT + SLACK)
    end.assert_known()
    assert any(isinstance(survivor.error, CommTimeout) for survivor in end.survivors)


@pytest.mark.parametrize("front_end", DENSE)
@pytest.mark.parametrize("disaster", ["is killed", "is stopped"])
def test_a_dense_step_without_one_of_the_ranks_ends_in_time(disaster: str, front_end: str, tmp_path: Path) -> None:
    """Inside a sum over all of them, who is missing is who does not say that it is there."""
    end = ending(front_end, disaster, tmp_path, TIMEOUT, TIMEOUT + SLACK)
    end.assert_known()
    for survivor in end.survivors:
        assert "all_reduce (dense): " in str(survivor.error)
    if disaster == "is stopped":
        assert any(isinstance(survivor.error, CommTimeout) for survivor in end.survivors)


@pytest.mark.parametrize("front_end", ALL)
def test_an_error_in_the_worker_is_raised_on_every_rank(front_end: str, tmp_path: Path) -> None:
    """Long before the timeout: as itself where it happened, and with its traceback on the others."""
    end = ending(front_end, "raises", tmp_path, LONG, LONG / 2)
    end.assert_known()
    for survivor in end.survivors:
        assert "RuntimeError: disk on fire" in str(survivor.error)
        assert "in burn" in str(survivor.error)
    assert type(end.victim.error) is RuntimeError
    assert str(end.victim.error) == "disk on fire"
    assert "in burn" in end.victim.trace


def train_and_stay(connect: Callable[..., Any], front_end: str, happened: Path) -> None:
    """The process of the victim lives on, as in a notebook, so that connections stay."""
    try:
        train(connect, front_end, LONG, "raises", happened)
    finally:
        if dist.get_rank() == VICTIM:
            time.sleep(LONG)


@pytest.mark.parametrize("front_end", DENSE)
def test_an_error_in_a_dense_step_is_heard_of_though_nobody_hangs_up(front_end: str, tmp_path: Path) -> None:
    happened = tmp_path / "happened"
    with worlds.start("gloo", P, train_and_stay, front_end, happened) as ranks:
        assert worlds.wait_until(happened.exists, 60)
        assert worlds.wait_until(lambda: all(ranks.outcome(rank).error for rank in SURVIVORS), LONG / 4)
        for rank in SURVIVORS:
            assert isinstance(ranks.outcome(rank).error, Aborted)
            assert "RuntimeError: disk on fire" in str(ranks.outcome(rank).error)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_rank_that_leaves_between_steps_ends_the_others(front_end: str, tmp_path: Path) -> None:
    """Long before the timeout. In a forward pass of DDP it may be DDP itself that misses the rank."""
    end = ending(front_end, "leaves", tmp_path, LONG, LONG / 2)
    assert str(end.victim.error) == "disk on fire"
    for survivor in end.survivors:
        assert isinstance(survivor.error, RuntimeError if front_end == "ddp" else CommError), survivor.trace
