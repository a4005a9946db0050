"""Runs whose ranks act as hosts: replicas stay alike, and checkpoints go on, to the bit or with other ranks."""

from __future__ import annotations

from pathlib import Path
from signal import Signals
from typing import Any

import pytest
import torch

from oktopk.train.config.plan import Plan
from tests.support.train.runs import BATCH, Batch, Recipe, Regression, Runs, assert_same, parameters, timeless

OPTIONS: dict[str, Any] = {"max_epochs": 3, "warmup_steps": 4, "density": 0.2, "compressor": "oktopk"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, monkeypatch)


def stopping(runs: Runs, step: int) -> Recipe:
    def stop(task: Regression, batch: Batch) -> None:
        if (batch.rank, batch.epoch, batch.step) == (3, 1, step):
            runs.stops[3].signal = Signals.SIGTERM

    return Recipe(samples=24 * BATCH, before=stop)


def test_replicas_stay_alike_and_a_resumed_run_is_the_same_to_the_bit(runs: Runs) -> None:
    plain = Recipe(samples=24 * BATCH)
    whole = runs("whole", world=4, recipe=plain, ranks_per_host=2, **OPTIONS)
    assert whole.result["phases"]["sparse"]["steps"] == 14
    for trainer in whole.trainers[1:]:
        assert torch.equal(parameters(trainer), parameters(whole.trainers[0]))
    cut = runs("cut", world=4, recipe=stopping(runs, 2), ranks_per_host=2, **OPTIONS)
    assert cut.result["steps"] == 6 + 3
    resumed = runs("cut", world=4, recipe=plain, resume=True, ranks_per_host=2, **OPTIONS)
    assert_same(resumed.state, whole.state)
    assert_same(timeless(resumed.result), timeless(whole.result))


@pytest.mark.parametrize(("world", "ranks"), [(6, 3), (3, 1), (2, 2)])
def test_other_ranks_and_hosts_go_on(runs: Runs, world: int, ranks: int) -> None:
    runs(world=4, recipe=stopping(runs, 2), ranks_per_host=2, **OPTIONS)
    resumed = runs(world=world, recipe=Recipe(samples=24 * BATCH), resume=True, ranks_per_host=ranks, **OPTIONS)
    assert resumed.outcome.code == 0
    assert resumed.result["finished"]
    for trainer in resumed.trainers[1:]:
        assert torch.equal(parameters(trainer), parameters(resumed.trainers[0]))


def test_as_many_ranks_on_other_hosts_are_refused_on_all_ranks(runs: Runs) -> None:
    runs(world=4, recipe=stopping(runs, 2), ranks_per_host=2, **OPTIONS)
    refused = runs(world=4, recipe=Recipe(samples=24 * BATCH), resume=True, ranks_per_host=4, **OPTIONS)
    for end in refused.ends:
        assert isinstance(end, Exception)
        assert "saved with ranks_per_host=2, now it is 4" in str(end)


def test_the_plan_counts_hosts() -> None:
    def volume(world: int, ranks: int) -> list[str]:
        return Plan(14, 10, None, 128, "oktopk", 0.01, 1_000_000, world, ranks_per_host=ranks).volume()

    assert volume(8, 2) == [line.replace("a rank sends", "a host sends") for line in volume(4, 1)]
    assert "a single host sends nothing" in volume(3, 3)[0]
